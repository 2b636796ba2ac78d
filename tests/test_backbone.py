"""The backbone against transformers and against itself: cached, scanned, with every kind of RoPE."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.backbone.attention import causal_mask
from entmtp_jax.backbone.cache import init_cache, write_rows
from entmtp_jax.backbone.precision import linear_bfloat16_two_rows, linear_highest
from entmtp_jax.backbone.transformer import build_backbone, stack_layers
from entmtp_jax.checkpoints import load_backbone, save_backbone
from entmtp_jax.config import BackboneConfig, RopeScaling
from entmtp_jax.errors import UserError
from entmtp_jax.testing.reference import reference_logits
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone
from tests.decoding import logits_of

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 40))


def small_llama(**changes):
    from transformers import LlamaConfig

    shape = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    return LlamaConfig(**(shape | changes))


def rope(kind, **changes):
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **changes}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "every head its own key": {"num_key_value_heads": 4},
    "one key for all heads": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 16},
    "linear": {"rope_parameters": rope("linear")},
    "llama3": {"rope_parameters": rope("llama3", **LLAMA3)},
    "high theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}


def check_against_transformers(peer, folder):
    import torch

    peer.eval().save_pretrained(folder)
    config, params = load_backbone(folder, "float32")
    with torch.no_grad():
        expected = peer(torch.tensor(TOKENS)).logits.numpy()
    ours = logits_of(build_backbone(config), jax.tree.map(jnp.asarray, params), TOKENS)
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_transformers_llama(variant, tmp_path):
    from transformers import LlamaForCausalLM

    check_against_transformers(LlamaForCausalLM(small_llama(**VARIANTS[variant])), tmp_path)


def test_logits_agree_with_transformers_qwen2(tmp_path):
    """The same module with query, key and value biases."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    peer = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in small_llama().to_dict().items() if k in SHARED_KEYS}))
    with torch.no_grad():
        for name, value in peer.named_parameters():
            if name.endswith("bias"):
                value.normal_()
    check_against_transformers(peer, tmp_path)


SHARED_KEYS = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "initializer_range"),
}


def test_the_reference_decoder_agrees_too():
    """So the NumPy reference that exactness is tested against is itself the model."""
    backbone, params = tiny_backbone()
    expected = reference_logits(TINY_CONFIG, params, TOKENS[0].tolist())
    np.testing.assert_allclose(logits_of(backbone, params, TOKENS)[0], expected, atol=2e-3, rtol=2e-3)


def test_scanned_layers_equal_unrolled_ones():
    config = dataclasses.replace(TINY_CONFIG, taps=(0, 1))
    backbone, params = tiny_backbone(config=config)
    scanned = build_backbone(dataclasses.replace(config, scan_layers=True))
    stacked = stack_layers(params, config.num_layers)
    assert jax.tree.structure(stacked) == jax.tree.structure(scanned.init(jax.random.key(0)))
    cache = init_cache(config, batch=2, slots=1, dtype=jnp.float32)
    stacked_cache = init_cache(scanned.config, batch=2, slots=1, dtype=jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(40), TOKENS.shape)
    rest = (jnp.asarray(TOKENS), positions, causal_mask(40))
    zeros = jnp.zeros(2, jnp.int32)
    ours = backbone.forward(params, *rest, cache, zeros)
    theirs = scanned.forward(stacked, *rest, stacked_cache, zeros)
    np.testing.assert_allclose(ours.normed, theirs.normed, atol=1e-5)
    np.testing.assert_allclose(jnp.stack(ours.new.keys), theirs.new.keys, atol=1e-5)
    for one, other in zip(ours.taps, theirs.taps, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("split", [1, 7, 39])
def test_a_cached_pass_equals_an_uncached_one(split):
    backbone, params = tiny_backbone()
    expected = logits_of(backbone, params, TOKENS)[:, split:]
    cache, zeros = init_cache(TINY_CONFIG, batch=2, slots=48, dtype=jnp.float32), jnp.zeros(2, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(40), TOKENS.shape)
    tokens = jnp.asarray(TOKENS)
    first = backbone.forward(params, tokens[:, :split], positions[:, :split], causal_mask(split), cache, zeros)
    cache = write_rows(cache, first.new, zeros)
    rest = causal_mask(40 - split)
    lengths = jnp.full(2, split, jnp.int32)
    second = backbone.forward(params, tokens[:, split:], positions[:, split:], rest, cache, lengths)
    np.testing.assert_allclose(backbone.unembed(params, second.normed), expected, atol=2e-4)


def test_bfloat16_weights_stay_close_and_a_lone_row_equals_two():
    rng = np.random.default_rng(1)
    x, weight = jnp.asarray(rng.normal(size=(4, 64)), jnp.float32), jnp.asarray(rng.normal(size=(96, 64)), jnp.float32)
    rounded = weight.astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(linear_highest(x, weight), exact, atol=1e-4)
    many = linear_bfloat16_two_rows(x, rounded)
    np.testing.assert_allclose(many, exact, atol=0.5)
    np.testing.assert_allclose(linear_bfloat16_two_rows(x[:1], rounded), many[:1], rtol=1e-6)
    assert many.dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_heads": 3}, "multiple"), ({"head_dim": 7}, "odd"), ({"taps": (2,)}, "taps")],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY_CONFIG, **changes)


def test_unknown_rope_scaling_is_refused():
    with pytest.raises(UserError, match="yarn"):
        RopeScaling(kind="yarn")


def test_the_config_survives_json():
    config = dataclasses.replace(TINY_CONFIG, eos_ids=(1, 2), taps=(0,), rope_scaling=RopeScaling("linear", 2.0))
    assert BackboneConfig.from_json(config.to_json()) == config


@pytest.mark.model
def test_the_default_model_agrees_with_transformers(tmp_path):
    """The GGUF's weights, dequantised and written as a Hugging Face folder, give transformers the same logits."""
    import torch
    from transformers import AutoModelForCausalLM

    from entmtp_jax.hub import DEFAULT_MODEL, cache_folder, resolve_model

    config, params = load_backbone(resolve_model(DEFAULT_MODEL, cache_folder()), "float32")
    save_backbone(tmp_path, config, params)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 64))
    with torch.no_grad():
        expected = peer(torch.tensor(tokens)).logits.numpy()
    ours = logits_of(build_backbone(config), jax.tree.map(jnp.asarray, params), tokens)
    np.testing.assert_allclose(ours, expected, atol=2e-3)
    assert (ours.argmax(-1) == expected.argmax(-1)).all()
