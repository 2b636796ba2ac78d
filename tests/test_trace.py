"""A trace predicts real decoding exactly, for every kind of head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.backbone.attention import causal_mask
from entmtp_jax.backbone.cache import init_cache
from entmtp_jax.calibration.replay import accepted_lengths, replay_ladder
from entmtp_jax.calibration.trace import UNRANKED, KnownText, trace_texts
from entmtp_jax.decode import build_decoder
from entmtp_jax.generation import generate
from entmtp_jax.parts import DecodeConfig, ModelParams
from entmtp_jax.scheduler import ladder
from entmtp_jax.state import Request
from entmtp_jax.testing.tiny import TINY_CONFIG
from tests.decoding import BANK, NUM_TOPOLOGIES, PROMPTS, continuation, logits_of, tiny
from tests.head_kinds import DEPTH, KINDS, head, head_params, shared

NEW_TOKENS = 40
DECAY = 0.75


def hidden_states(tokens):
    backbone, params = tiny()
    cache = init_cache(TINY_CONFIG, batch=1, slots=1, dtype=jnp.float32)
    positions = jnp.arange(len(tokens))[None]
    zero = jnp.zeros(1, jnp.int32)
    text = jnp.asarray(tokens)[None]
    return np.asarray(backbone.forward(params, text, positions, causal_mask(len(tokens)), cache, zero).normed[0])


def known_text(prompt):
    tokens = prompt + continuation(prompt, NEW_TOKENS)
    return KnownText(np.asarray(tokens, np.int32), len(prompt), hidden_states(tokens))


def trace(kind, prompts):
    backbone, params = tiny()
    unembed = functools.partial(backbone.unembed, params)
    texts = [known_text(prompt) for prompt in prompts]
    return trace_texts(head(kind), head_params(kind), shared(), unembed, texts, depth=DEPTH)


@pytest.mark.parametrize("kind", KINDS)
def test_replay_of_a_trace_is_real_decoding(kind):
    """Steps by topology, text by text, at a threshold inside the range of the entropies."""
    backbone, params = tiny()
    decoder = build_decoder(backbone, head(kind), BANK, DecodeConfig(capacity=96, chunk=8))
    model = ModelParams(params, head_params(kind))
    found = trace(kind, PROMPTS)
    lengths = np.stack([accepted_lengths(found, topology) for topology in BANK.topologies])
    edge = float(np.median(found.entropy_nats))
    policy = ladder([2, 4], [edge], num_topologies=NUM_TOPOLOGIES)
    kept = 0
    for index, prompt in enumerate(PROMPTS):
        mine = found.text == index
        part = found._replace(ranks=found.ranks[mine], entropy_nats=found.entropy_nats[mine], text=found.text[mine])
        replay = replay_ladder(part, lengths[:, mine], [edge], [2, 4], DECAY)
        real = generate(decoder, model, [Request(prompt, NEW_TOKENS)], policy).completions[0]
        assert real.tokens == continuation(prompt, NEW_TOKENS)
        assert replay.steps.tolist() == np.bincount(real.topologies, minlength=NUM_TOPOLOGIES).tolist()
        assert replay.tokens == NEW_TOKENS - 1
        kept += replay.tokens - replay.steps.sum()
    if kind in ("lookup", "hybrid"):
        assert kept > 20, "the texts repeat themselves, so something must have been kept"


def test_entropies_and_places_are_those_of_the_texts():
    found = trace("medusa", PROMPTS[:2])
    assert np.bincount(found.text).tolist() == [NEW_TOKENS - 1] * 2
    for index, prompt in enumerate(PROMPTS[:2]):
        tokens = np.asarray(prompt + continuation(prompt, NEW_TOKENS))
        logprobs = np.asarray(jax.nn.log_softmax(logits_of(*tiny(), tokens[None])[0], axis=-1), np.float64)
        expected = -(np.exp(logprobs) * logprobs).sum(axis=1)[len(prompt) - 1 : -2]
        np.testing.assert_allclose(found.entropy_nats[found.text == index], expected, rtol=1e-4)


def test_tokens_past_the_end_are_not_ranked():
    found = trace("lookup", PROMPTS[:1])
    for back in range(1, DEPTH):
        assert (found.ranks[-back, back:] == UNRANKED).all()
