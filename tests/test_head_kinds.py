"""Heads of every kind come back from their folder as they went in, and refuse what is not theirs."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from entmtp_jax.backbone.precision import linear_highest
from entmtp_jax.checkpoints.head_files import load_head, read_head_info, save_head
from entmtp_jax.checkpoints.head_kinds import KINDS, expected_params, flat_names, kind_of
from entmtp_jax.errors import UserError
from entmtp_jax.heads.hydra_layers import HydraConfig
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.heads.mtp_layers import MTPConfig
from entmtp_jax.testing.tiny import TINY_CONFIG
from tests.head_kinds import DRAFT_IDS, D, V, shared

SHAPES = {
    "medusa": MedusaConfig(D, V, num_heads=2, own_output=True),
    "hydra": HydraConfig(D, V, num_heads=2, num_layers=2, prefix=False, own_output=True),
    "hydra++": HydraConfig(D, V, num_heads=2, num_layers=2, intermediate_size=24, draft_vocab_size=len(DRAFT_IDS)),
    "mtp": MTPConfig(D, V, 24, max_depth=3, num_modules=2, draft_vocab_size=len(DRAFT_IDS), embedding_first=False),
}
# Qwen's block has biases.
BACKBONES = {"hydra++": dataclasses.replace(TINY_CONFIG, qkv_bias=True)}


def backbone_of(name):
    return BACKBONES.get(name, TINY_CONFIG)


def random_params(name):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), expected_of(name))


def expected_of(name):
    return expected_params(SHAPES[name], backbone_of(name))


def save(folder, name, params=None):
    shape = SHAPES[name]
    save_head(
        folder,
        shape=shape,
        backbone=backbone_of(name),
        params=random_params(name) if params is None else params,
        draft_ids=DRAFT_IDS if shape.draft_vocab_size else None,
        backbone_name="tiny",
        backbone_fingerprint="0123456789abcdef",
        draft_vocab={},
        provenance={"seed": 0},
    )


def load(folder, backbone=TINY_CONFIG, dtype=None):
    return load_head(folder, backbone, shared(), top_k=4, linear=linear_highest, dtype=dtype)


@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_comes_back_as_it_was(tmp_path, name):
    """Matrices as bfloat16, biases and norm scales exactly, the backbone's rows as they are."""
    params = random_params(name)
    save(tmp_path, name, params)
    info = read_head_info(tmp_path)
    assert info.shape == SHAPES[name] and info.kind == kind_of(SHAPES[name])
    head, loaded = load(tmp_path, backbone_of(name))
    assert head.name == name and head.top_k == 4
    draft_ids = DRAFT_IDS if SHAPES[name].draft_vocab_size else None
    expected = KINDS[info.kind].prepare(SHAPES[name], params, draft_ids, shared())
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for tensor, (got, want) in {k: (v, flat_names(expected)[k]) for k, v in flat_names(loaded).items()}.items():
        exact = tensor.endswith(("bias", "scale")) or tensor in ("output", "draft_ids")
        stored = np.asarray(want) if exact else np.asarray(want).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(got, stored, err_msg=tensor)
        assert got.dtype == want.dtype


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_are_named_by_their_place_and_small_ones_stay_float32(tmp_path, name):
    save(tmp_path, name)
    with safe_open(tmp_path / "heads.safetensors", framework="numpy") as file:
        dtypes = {tensor: file.get_slice(tensor).get_dtype() for tensor in file.keys()}  # noqa: SIM118 - no mapping
    draft_ids = {"draft_ids"} if SHAPES[name].draft_vocab_size else set()
    assert set(dtypes) == set(flat_names(expected_of(name))) | draft_ids
    for tensor, dtype in dtypes.items():
        small = tensor.endswith(("bias", "scale"))
        assert dtype == ("I32" if tensor == "draft_ids" else "F32" if small else "BF16"), tensor


def test_names_of_the_tensors():
    assert set(flat_names(expected_of("mtp"))) == {
        f"modules.{module}.{tensor}"
        for module in (0, 1)
        for tensor in (
            "embedding_norm.scale",
            "hidden_norm.scale",
            "projection",
            "layer.attention_norm.scale",
            "layer.attention.qkv",
            "layer.attention.output",
            "layer.mlp_norm.scale",
            "layer.mlp.gate_up",
            "layer.mlp.down",
            "final_norm.scale",
        )
    }
    hydra = {name: leaf.shape for name, leaf in flat_names(expected_of("hydra++")).items()}
    assert hydra["heads.head_1.entry.kernel"] == (D, 3 * D) and hydra["heads.head_1.skip.bias"] == (D,)
    assert hydra["prefix.layer.attention.qkv_bias"] == (2, 4, 8) and hydra["prefix.norm.scale"] == (D,)
    assert flat_names(expected_of("hydra"))["heads.head_0.output.kernel"].shape == (V, D)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_get_the_dtype_that_is_asked_for(tmp_path, dtype):
    save(tmp_path, "mtp")
    _, params = load(tmp_path, dtype=dtype)
    assert params["output"].dtype == params["modules"][1]["layer"]["mlp"]["down"].dtype == jnp.dtype(dtype)
    assert params["modules"][0]["final_norm"]["scale"].dtype == jnp.float32
    assert params["draft_ids"].dtype == jnp.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules.1.layer.mlp.down": None}, "tensor modules.1.layer.mlp.down of shape (32, 24) is missing; mtp heads"),
        ({"modules.2.projection": np.zeros((2, 2), np.float32)}, "tensor modules.2.projection has no place in mtp"),
        (
            {"modules.0.projection": np.zeros((32, 32), np.float32)},
            "tensor modules.0.projection has shape (32, 32), but the config and the backbone ask for (32, 64)",
        ),
        ({"modules.0.final_norm.scale": np.full(32, np.nan, np.float32)}, "modules.0.final_norm.scale holds NaN"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, change, message):
    save(tmp_path, "mtp")
    file = tmp_path / "heads.safetensors"
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(UserError, match=re.escape(message)):
        load(tmp_path)


def test_a_block_of_another_backbone_is_named(tmp_path):
    """The same hidden size and vocabulary, but other attention heads."""
    save(tmp_path, "mtp")
    other = dataclasses.replace(TINY_CONFIG, num_kv_heads=4)
    message = "tensor modules.0.layer.attention.qkv has shape (2, 4, 8, 32), but the config and the backbone ask for"
    with pytest.raises(UserError, match=re.escape(message)):
        load(tmp_path, other)


@pytest.mark.parametrize("name", SHAPES)
def test_weights_of_another_kind_are_refused(tmp_path, name):
    """A config that says one kind beside weights of another."""
    other = "mtp" if name != "mtp" else "medusa"
    save(tmp_path / "one", name)
    save(tmp_path / "other", other)
    (tmp_path / "other" / "heads.safetensors").replace(tmp_path / "one" / "heads.safetensors")
    with pytest.raises(UserError, match=f"{kind_of(SHAPES[name])} heads have it"):
        load(tmp_path / "one", backbone_of(name))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hydra++", {"intermediate_size": None}, "a prefix layer needs an intermediate size"),
        ("hydra++", {"prefix": 1}, "must be true or false"),
        ("hydra++", {"num_heads": 0}, "at least one head"),
        ("mtp", {"num_modules": 9}, "no more than levels"),
        ("mtp", {"draft_vocab_size": 99}, "draft vocabulary of 99 ids"),
        ("mtp", {"num_heads": 3}, "unknown key 'num_heads'"),
    ],
)
def test_impossible_shapes_name_the_file(tmp_path, name, change, message):
    save(tmp_path, name)
    file = tmp_path / "config.json"
    data = json.loads(file.read_text())
    data["shape"] |= change
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match=rf"config\.json.*{re.escape(message)}"):
        load(tmp_path)
