"""Backbones written as Hugging Face folders: read back by us, and by transformers with the same logits."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.backbone.transformer import build_backbone, stack_layers
from entmtp_jax.checkpoints import load_backbone, save_backbone
from entmtp_jax.checkpoints.llama_names import TensorSource, expected_shapes, params_from_tensors
from entmtp_jax.config import BackboneConfig, RopeScaling
from entmtp_jax.errors import UserError
from tests.decoding import logits_of

SMALL = BackboneConfig(
    vocab_size=23, hidden_size=16, intermediate_size=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16)


def random_params(config, dtype="float32", seed=0):
    """Parameters whose every entry differs, biases and norms too."""
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in expected_shapes(config)}
    source = TensorSource("random", {name: value.shape for name, value in tensors.items()}, tensors.__getitem__)
    return params_from_tensors(config, source, dtype)


def assert_same(params, expected):
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


scalings = st.one_of(
    st.just(RopeScaling()),
    st.builds(RopeScaling, kind=st.just("linear"), factor=st.floats(1, 16)),
    st.builds(
        RopeScaling,
        kind=st.just("llama3"),
        factor=st.floats(1, 16),
        low_freq_factor=st.floats(0.5, 2),
        high_freq_factor=st.floats(3, 8),
        original_max_positions=st.integers(8, 9000),
    ),
)


@st.composite
def configs(draw):
    groups = draw(st.integers(1, 3))
    return BackboneConfig(
        vocab_size=draw(st.integers(2, 9)),
        hidden_size=draw(st.integers(1, 7)),
        intermediate_size=draw(st.integers(1, 7)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=groups * draw(st.integers(1, 3)),
        num_kv_heads=groups,
        head_dim=2 * draw(st.integers(1, 3)),
        rope_theta=draw(st.floats(1, 1e6)),
        rope_scaling=draw(scalings),
        norm_eps=draw(st.floats(1e-8, 1e-3)),
        qkv_bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        max_positions=draw(st.integers(1, 200000)),
        bos_id=draw(st.none() | st.integers(0, 5)),
        eos_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3, unique=True))),
    )


@settings(max_examples=40, deadline=None)
@given(config=configs(), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_what_is_written_is_read_back(config, dtype):
    params = random_params(config, dtype)
    with tempfile.TemporaryDirectory() as folder:
        save_backbone(Path(folder), config, params)
        read_config, read_params = load_backbone(Path(folder), dtype)
        assert read_config == config
        assert_same(read_params, params)


VARIANTS = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "biases": {"qkv_bias": True},
    "tied with biases": {"qkv_bias": True, "tie_embeddings": True, "num_kv_heads": 1},
    "wide heads": {"head_dim": 10},
    "linear": {"rope_theta": 500000.0, "rope_scaling": RopeScaling("linear", factor=4.0)},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3 with biases": {"rope_scaling": LLAMA3, "qkv_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_computes_the_same_logits(tmp_path, variant):
    config = dataclasses.replace(SMALL, **VARIANTS[variant])
    # Products stay of order one, as in a trained model; norms and biases are as they are drawn.
    params = jax.tree.map(lambda leaf: leaf * (0.3 if leaf.ndim > 1 else 1.0), random_params(config))
    save_backbone(tmp_path, config, params)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    peer, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (1, 30))
    with torch.no_grad():
        theirs = peer.eval()(torch.tensor(tokens)).logits.numpy()
    ours = logits_of(build_backbone(config), jax.tree.map(jnp.asarray, params), tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def test_absent_special_tokens_are_absent_for_transformers(tmp_path):
    save_backbone(tmp_path, SMALL, random_params(SMALL))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.bos_token_id is None and theirs.eos_token_id is None


def test_scanned_layers_and_arrays_on_the_device_are_written_alike(tmp_path):
    config = dataclasses.replace(SMALL, scan_layers=True, taps=(1,))
    params = random_params(SMALL, "bfloat16")
    stacked = stack_layers(jax.tree.map(jnp.asarray, params), SMALL.num_layers)
    save_backbone(tmp_path, config, stacked)
    read_config, read_params = load_backbone(tmp_path, "bfloat16")
    assert read_config == SMALL
    assert_same(read_params, params)


def test_parameters_of_another_shape_are_refused(tmp_path):
    biased = random_params(dataclasses.replace(SMALL, qkv_bias=True))
    with pytest.raises(UserError, match=r"the parameters: tensor '.*self_attn.q_proj.bias' .*has no place"):
        save_backbone(tmp_path, SMALL, biased)
    with pytest.raises(UserError, match=r"tensor model.embed_tokens.weight has shape \(23, 16\)"):
        save_backbone(tmp_path, dataclasses.replace(SMALL, vocab_size=24), random_params(SMALL))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named_and_an_old_one_is_replaced(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="cannot write .*taken"):
        save_backbone(tmp_path / "taken", SMALL, random_params(SMALL))
    for seed in (0, 1):
        save_backbone(tmp_path / "new" / "folder", SMALL, random_params(SMALL, seed=seed))
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]
    assert_same(load_backbone(tmp_path / "new" / "folder", "float32")[1], random_params(SMALL, seed=1))
    assert json.loads((tmp_path / "new" / "folder" / "config.json").read_text())["model_type"] == "llama"
