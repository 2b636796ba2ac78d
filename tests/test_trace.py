"""A trace predicts real decoding exactly, for every kind of head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.calibration.known_texts import read_texts
from entmtp_jax.calibration.replay import replay, select_texts
from entmtp_jax.calibration.trace import UNRANKED, KnownText, trace_texts
from entmtp_jax.decode import build_decoder
from entmtp_jax.generation import generate
from entmtp_jax.parts import DecodeConfig, ModelParams
from entmtp_jax.report.stats import steps_outside_loops
from entmtp_jax.scheduler import Signal, fixed, hysteresis, ladder
from entmtp_jax.state import Request
from entmtp_jax.training.data import from_sequences
from tests.decoding import BANK, NUM_TOPOLOGIES, PROMPTS, continuation, logits_of, tiny
from tests.head_kinds import DEPTH, KINDS, head, head_params, shared

NEW_TOKENS = 40


def end_of(prompt):
    """A token that stands in the middle of the prompt's plain text."""
    return continuation(prompt, NEW_TOKENS)[25]


def answer(prompt, ended):
    text = continuation(prompt, NEW_TOKENS)
    return text[: text.index(end_of(prompt)) + 1] if ended else text


def known_texts(prompts, ended=False):
    backbone, params = tiny()
    texts = [prompt + answer(prompt, ended) for prompt in prompts]
    records = from_sequences(texts, [len(prompt) for prompt in prompts])
    return read_texts(backbone, params, records, lambda done, total: None)


def trace(kind, prompts, ended=False):
    backbone, params = tiny()
    unembed = functools.partial(backbone.unembed, params)
    texts = known_texts(prompts, ended)
    return trace_texts(head(kind), head_params(kind), shared(), unembed, texts, depth=DEPTH)


def decoder(kind, fresh=False):
    return build_decoder(tiny()[0], head(kind), BANK, DecodeConfig(capacity=96, chunk=8, fresh_signals=fresh))


def between(values, share):
    """A threshold with the same distance from its two neighbours among the values, so that no rounding matters."""
    ordered = np.unique(values)
    place = int(share * (len(ordered) - 1))
    return float(ordered[place : place + 2].mean())


def policies_for(found):
    """Each asks for the previous topology, an average or both, at thresholds inside the range of its signal."""
    low, high = between(found.entropy_nats, 0.3), between(found.entropy_nats, 0.7)
    keeping = [[2, index, 4] for index in range(NUM_TOPOLOGIES)]  # in the middle bin: whatever it was
    return {
        "average entropy": hysteresis(keeping, [low, high]),
        "entropy": ladder([4, 3, 0], [low, high], num_topologies=NUM_TOPOLOGIES, signal=Signal.ENTROPY),
        "probability": hysteresis(keeping, [between(found.top1_prob, 0.4), 0.99999], signal=Signal.TOP1_PROB),
        "kept drafts": ladder([3, 1, 2], [0.07, 0.31], num_topologies=NUM_TOPOLOGIES, signal=Signal.ACCEPTED_EMA),
    }


def check_equal(found, policy, real, **options):
    """Replay of one text gives the steps by topology and the kept drafts of the real run, also outside loops."""
    replayed = replay(found, BANK.topologies, [policy], **options)
    outside = steps_outside_loops(real)
    assert replayed.steps[0, 0].tolist() == np.bincount(real.topologies, minlength=NUM_TOPOLOGIES).tolist()
    assert found.new_tokens[0] == len(real.tokens) == 1 + real.emitted.sum()
    assert [int(field[0, 0]) for field in replayed[1:]] == [
        real.accepted.sum(),
        outside.sum(),
        real.emitted[outside].sum(),
        real.accepted[outside].sum(),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_replay_of_a_trace_is_real_decoding(kind):
    """Text by text: cut by the limit and ended by a token, under policies of several signals and tables."""
    built, model = decoder(kind), ModelParams(tiny()[1], head_params(kind))
    kept = 0
    for ended, prompts in ((False, PROMPTS[:1] + PROMPTS[3:]), (True, PROMPTS[4:])):
        found = trace(kind, prompts, ended)
        assert found.agrees.all()
        for name, policy in policies_for(found).items():
            used = np.zeros(NUM_TOPOLOGIES, int)
            for index, prompt in enumerate(prompts):
                eos_ids = (end_of(prompt),) if ended else ()
                real = generate(built, model, [Request(prompt, NEW_TOKENS, eos_ids)], policy).completions[0]
                assert real.tokens == answer(prompt, ended)
                assert real.finish_reason == ("eos" if ended else "length")
                check_equal(select_texts(found, np.arange(len(prompts)) == index), policy, real)
                used += np.bincount(real.topologies, minlength=NUM_TOPOLOGIES)
                kept += real.accepted.sum()
            assert ended or name == "kept drafts" or (used > 0).sum() > 1, "thresholds at which something is chosen"
    if kind in ("lookup", "hybrid"):
        assert kept > 40, "the texts repeat themselves, so something must have been kept"


@pytest.mark.parametrize("kind", ["lookup", "medusa", "mtp"])
def test_the_path_value_of_a_fresh_draft_is_replayed_too(kind):
    built, model = decoder(kind, fresh=True), ModelParams(tiny()[1], head_params(kind))
    found = trace(kind, PROMPTS[:2])
    values = found.top1_prob * np.exp(found.chain_logprobs[:, : BANK.depth].sum(axis=1))
    policy = ladder([0, 2], [between(values, 0.5)], num_topologies=NUM_TOPOLOGIES, signal=Signal.PATH_VALUE)
    for index, prompt in enumerate(PROMPTS[:2]):
        real = generate(built, model, [Request(prompt, NEW_TOKENS)], policy).completions[0]
        check_equal(select_texts(found, np.arange(2) == index), policy, real, fresh=True)
        assert len(np.unique(real.topologies)) == 2


@pytest.mark.parametrize("kind", ["hydra++", "mtp", "mtp of 3", "hybrid"])
def test_ranks_and_chain_are_those_after_a_prefill(kind):
    """A prompt that ends where the trace looks leaves the head in the state that the trace had there."""
    backbone, params = tiny()
    prompt, place = PROMPTS[4], 9
    built, found = decoder(kind), trace(kind, [prompt])
    tokens = prompt + continuation(prompt, NEW_TOKENS)
    at = len(prompt) + place  # length of the text whose last token is followed by the root
    start = built.start([Request(tokens[:at], 4)])
    state = built.prefill(ModelParams(params, head_params(kind)), start, fixed(0, num_topologies=NUM_TOPOLOGIES))
    root, path = jnp.asarray(tokens[at : at + 1]), jnp.asarray([tokens[at + 1 : at + 1 + DEPTH]])
    arguments = head_params(kind), shared(), state.head, root
    offered = np.asarray(head(kind).follow(*arguments, path).tokens[0])
    expected = [
        np.flatnonzero(row == token).tolist() or [UNRANKED] for row, token in zip(offered, path[0], strict=True)
    ]
    assert found.ranks[place].tolist() == [ranks[0] for ranks in expected]
    chain = head(kind).propose(*arguments, DEPTH).chain_logprobs[0]
    np.testing.assert_allclose(found.chain_logprobs[place], chain, rtol=1e-3, atol=1e-3)


def test_signals_and_places_are_those_of_the_texts():
    found = trace("medusa", PROMPTS[:2])
    assert np.bincount(found.text).tolist() == [NEW_TOKENS - 1] * 2
    for index, prompt in enumerate(PROMPTS[:2]):
        tokens = np.asarray(prompt + continuation(prompt, NEW_TOKENS))
        logprobs = np.asarray(jax.nn.log_softmax(logits_of(*tiny(), tokens[None])[0], axis=-1), np.float64)
        here = slice(len(prompt) - 1, -2)
        expected = -(np.exp(logprobs) * logprobs).sum(axis=1)[here]
        np.testing.assert_allclose(found.entropy_nats[found.text == index], expected, rtol=1e-4)
        np.testing.assert_allclose(found.top1_prob[found.text == index], np.exp(logprobs.max(axis=1))[here], rtol=1e-4)


def test_tokens_past_the_end_are_not_ranked():
    found = trace("lookup", PROMPTS[:1])
    for back in range(1, DEPTH):
        assert (found.ranks[-back, back:] == UNRANKED).all()


def test_repetitions_and_differing_choices_are_marked():
    """The answer 5 6 7 8 5 6 7 8: 3-grams recur from new token 6 on, which a step at position 5 emits first."""
    tokens = np.asarray([1, 2, 5, 6, 7, 8, 5, 6, 7, 8], np.int32)
    text = KnownText(tokens, 2, np.zeros((len(tokens), 32), np.float32))
    backbone, params = tiny()
    unembed = functools.partial(backbone.unembed, params)
    found = trace_texts(head("lookup"), {}, shared(), unembed, [text], depth=2)
    assert found.outside_loops.tolist() == [True] * 5 + [False] * 2
    # Zero hidden states give equal logits, and of equal ones id 0 is chosen, which nowhere stands.
    assert found.new_tokens.tolist() == [8] and not found.agrees.any()


def test_texts_without_a_step_leave_no_position():
    text = known_texts([PROMPTS[0]])[0]
    assert text.hidden is not None
    begun = [text._replace(tokens=text.tokens[:n], normed=text.normed[:n], hidden=text.hidden[:n]) for n in (6, 7)]
    backbone, params = tiny()
    unembed = functools.partial(backbone.unembed, params)
    found = trace_texts(head("lookup"), {}, shared(), unembed, begun, depth=DEPTH)
    assert found.new_tokens.tolist() == [0, 1] and found.ranks.shape == (0, DEPTH) and len(found.entropy_nats) == 0
    assert replay(found, BANK.topologies, [fixed(1, num_topologies=NUM_TOPOLOGIES)]).steps.sum() == 0
