"""The map between Hugging Face names and the parameter tree, against plain indexing."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.checkpoints.llama_names import (
    EMBEDDING,
    UNEMBED,
    TensorSource,
    expected_shapes,
    group_qkv,
    params_from_tensors,
    split_qkv,
    tensors_from_params,
)
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError

TINY = BackboneConfig(
    vocab_size=11, hidden_size=8, intermediate_size=6, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2
)


def make_config(**changes) -> BackboneConfig:
    return dataclasses.replace(TINY, **changes)


def random_tensors(config: BackboneConfig) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in expected_shapes(config)}


def source_of(tensors: dict[str, np.ndarray]) -> TensorSource:
    return TensorSource("file", {name: value.shape for name, value in tensors.items()}, tensors.__getitem__)


def test_qkv_is_grouped_by_key_value_head_as_in_the_docstring():
    config = make_config(head_dim=2)
    names = {"q": ["q0", "q1", "q2", "q3"], "k": ["k0", "k1"], "v": ["v0", "v1"]}
    rows = {part: np.repeat(np.array(heads), 2) for part, heads in names.items()}
    grouped = group_qkv(config, rows["q"], rows["k"], rows["v"])
    assert grouped.shape == (2, 4, 2)
    assert grouped[:, :, 0].tolist() == [["q0", "q1", "k0", "v0"], ["q2", "q3", "k1", "v1"]]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from([(), (5,)]))
@settings(deadline=None, max_examples=40)
def test_grouping_follows_the_contract_and_is_inverted(groups, per_group, half, rest):
    config = make_config(num_heads=groups * per_group, num_kv_heads=groups, head_dim=2 * half)
    size, generator = 2 * half, np.random.default_rng(groups)
    q = generator.normal(size=(groups * per_group * size, *rest))
    k, v = generator.normal(size=(2, groups * size, *rest))
    grouped = group_qkv(config, q, k, v)
    for head in range(groups * per_group):
        np.testing.assert_array_equal(grouped[head // per_group, head % per_group], q[head * size :][:size])
    for group in range(groups):
        np.testing.assert_array_equal(grouped[group, per_group], k[group * size :][:size])
        np.testing.assert_array_equal(grouped[group, per_group + 1], v[group * size :][:size])
    for back, original in zip(split_qkv(config, grouped), (q, k, v), strict=True):
        np.testing.assert_array_equal(back, original)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_tree_has_the_agreed_places_and_the_map_is_inverted(tie, bias):
    config = make_config(tie_embeddings=tie, qkv_bias=bias)
    tensors = random_tensors(config)
    params = params_from_tensors(config, source_of(tensors), "float32")
    attention = {"qkv": (2, 4, 2, 8), "output": (8, 8)} | ({"qkv_bias": (2, 4, 2)} if bias else {})
    layer = {
        "attention_norm": {"scale": (8,)},
        "attention": attention,
        "mlp_norm": {"scale": (8,)},
        "mlp": {"gate_up": (12, 8), "down": (8, 6)},
    }
    tree = {"embed": {"embedding": (11, 8)}, "layer_0": layer, "layer_1": layer, "final_norm": {"scale": (8,)}}
    if not tie:
        tree["unembed"] = {"kernel": (11, 8)}

    def shapes(node):
        return {name: shapes(child) for name, child in node.items()} if isinstance(node, dict) else node.shape

    assert shapes(params) == tree
    back = tensors_from_params(config, params)
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value)
    gate_up = params["layer_1"]["mlp"]["gate_up"]
    np.testing.assert_array_equal(gate_up[:6], tensors["model.layers.1.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(gate_up[6:], tensors["model.layers.1.mlp.up_proj.weight"])


def test_bfloat16_casts_matrices_and_keeps_norms_in_float32():
    config = make_config(qkv_bias=True)
    params = params_from_tensors(config, source_of(random_tensors(config)), "bfloat16")
    layer = params["layer_0"]
    matrices = [params["embed"]["embedding"], params["unembed"]["kernel"], *layer["attention"].values()]
    assert {matrix.dtype for matrix in [*matrices, *layer["mlp"].values()]} == {np.dtype(ml_dtypes.bfloat16)}
    scales = [params["final_norm"]["scale"], layer["attention_norm"]["scale"], layer["mlp_norm"]["scale"]]
    assert {scale.dtype for scale in scales} == {np.dtype(np.float32)}


@pytest.mark.parametrize("name", sorted(dict(expected_shapes(make_config(qkv_bias=True)))))
def test_every_missing_and_every_misshapen_tensor_is_named(name):
    config = make_config(qkv_bias=True)
    tensors = random_tensors(config)
    missing = {other: value for other, value in tensors.items() if other != name}
    with pytest.raises(UserError, match=f"file: tensor {name} of shape .* is missing"):
        params_from_tensors(config, source_of(missing), "float32")
    wrong = tensors | {name: np.zeros((3, *tensors[name].shape), np.float32)}
    with pytest.raises(UserError, match=rf"tensor {name} has shape \(3, .*config asks for"):
        params_from_tensors(config, source_of(wrong), "float32")


def test_an_absurd_number_of_layers_is_refused_at_once():
    with pytest.raises(UserError, match="model.layers.2.input_layernorm.weight of shape .* is missing"):
        params_from_tensors(make_config(num_layers=10**12), source_of(random_tensors(make_config())), "float32")


def test_a_transposed_matrix_is_refused():
    config = make_config()
    tensors = random_tensors(config)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].T
    with pytest.raises(UserError, match=rf"{name} has shape \(6, 8\), but the config asks for \(8, 6\)"):
        params_from_tensors(config, source_of(tensors), "float32")


def test_extra_tensors_are_refused_but_for_the_known_harmless_ones():
    config = make_config(tie_embeddings=True)
    tensors = random_tensors(config)
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(1, np.float32),
        "model.rotary_emb.inv_freq": np.zeros(1, np.float32),
        UNEMBED: tensors[EMBEDDING].copy(),
    }
    params_from_tensors(config, source_of(tensors | harmless), "float32")
    for extra in ("model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight", "score.weight"):
        with pytest.raises(UserError, match=f"tensor {extra!r} has no place"):
            params_from_tensors(config, source_of(tensors | {extra: np.zeros(1, np.float32)}), "float32")
    with pytest.raises(UserError, match=f"{UNEMBED} differs from {EMBEDDING}"):
        params_from_tensors(config, source_of(tensors | {UNEMBED: tensors[EMBEDDING] + 1}), "float32")


def test_other_dtypes_are_refused():
    config = make_config()
    with pytest.raises(UserError, match="'float16'.*float32, bfloat16"):
        params_from_tensors(config, source_of(random_tensors(config)), "float16")
