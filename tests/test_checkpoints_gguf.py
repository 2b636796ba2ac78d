"""GGUF files against Hugging Face state dicts, whole, altered and cut."""

from typing import Any

import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.checkpoints import load_backbone, load_config, tensors_from_params
from entmtp_jax.checkpoints.gguf import half_split, hugging_face_name
from entmtp_jax.config import RopeScaling
from entmtp_jax.errors import UserError
from tests.checkpoint_files import SIZES, GGUFModel, gguf_name, random_state


@pytest.fixture(scope="module")
def llama_state() -> dict[str, np.ndarray]:
    return random_state("llama", tie=False)


@pytest.fixture
def file(llama_state) -> GGUFModel:
    return GGUFModel("llama", llama_state)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_tensor_and_the_config(family, tie, tmp_path):
    state = random_state(family, tie)
    path = GGUFModel(family, state).write(tmp_path / "model.gguf")
    config, params = load_backbone(path, "float32")
    tensors = tensors_from_params(config, params)
    assert tensors.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(tensors[name], value)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.norm_eps, config.rope_theta, config.max_positions) == (1e-5, 10000.0, 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (19, 32, 64)
    assert (config.qkv_bias, config.tie_embeddings) == (family == "qwen2", tie)


def test_half_split_as_in_the_docstring():
    rows = np.array(["a0", "b0", "a1", "b1", "a2", "b2"])
    assert half_split(rows, 1).tolist() == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_tensor_names():
    assert hugging_face_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert hugging_face_name("output.weight") == "lm_head.weight"
    assert hugging_face_name("blk.0.attn_sinks.weight") == "blk.0.attn_sinks.weight"


def test_a_model_of_mixed_kinds(file, llama_state, tmp_path):
    kinds = {"token_embd.weight": Kind.Q8_0, "blk.0.attn_q.weight": Kind.Q4_1, "blk.1.ffn_up.weight": Kind.BF16}
    config, params = load_backbone(file.write(tmp_path / "model.gguf", kinds), "float32")
    tensors = tensors_from_params(config, params)
    for name, value in llama_state.items():
        step = {"token_embd.weight": 0.02, "blk.0.attn_q.weight": 0.3, "blk.1.ffn_up.weight": 0.02}
        np.testing.assert_allclose(tensors[name], value, atol=step.get(gguf_name(name), 0.0), rtol=0)


def test_end_tokens_and_bos(file, tmp_path):
    file.metadata |= {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
    }
    config = load_config(file.write(tmp_path / "model.gguf"))
    assert (config.bos_id, config.eos_ids) == (1, (2, 7))


def test_linear_scaling_in_both_spellings(file, tmp_path):
    file.metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert load_config(file.write(tmp_path / "new.gguf")).rope_scaling == RopeScaling("linear", 4.0)
    del file.metadata["rope.scaling.type"], file.metadata["rope.scaling.factor"]
    file.metadata |= {"rope.scale_linear": 4.0}
    assert load_config(file.write(tmp_path / "old.gguf")).rope_scaling == RopeScaling("linear", 4.0)


def test_llama3_scaling_is_recognised_from_its_divisors(file, tmp_path):
    file.metadata |= {"attention.key_length": 8, "rope.freq_base": 500000.0}
    long: dict[str, Any] = SIZES | {"max_position_embeddings": 131072}
    theirs = transformers.LlamaConfig(
        **long,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 500000.0 ** (-np.arange(0, 8, 2) / 8)
    file.tensors["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32)
    config = load_config(file.write(tmp_path / "model.gguf"))
    assert config.rope_scaling.kind == "llama3"
    np.testing.assert_allclose(config.rope_scaling.factor, 8.0, rtol=1e-5)
    load_backbone(tmp_path / "model.gguf", "float32")
    file.tensors["rope_freqs.weight"][1] *= 1.5
    with pytest.raises(UserError, match="not those of llama3 scaling"):
        load_config(file.write(tmp_path / "other.gguf"))


REFUSED = {
    "no heads": ({"attention.head_count": 0}, "attention.head_count must be positive, got 0"),
    "experts": ({"expert_count": 8}, "mixture of experts"),
    "window": ({"attention.sliding_window": 32}, r"sliding-window attention \(32 tokens\)"),
    "value size": ({"attention.value_length": 16}, "values of another size"),
    "partial rotary": ({"rope.dimension_count": 4}, "part of each head"),
    "yarn": ({"rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
    "by layer": ({"attention.head_count_kv": [2, 1]}, "attention.head_count_kv differs by layer"),
    "missing": ({"attention.head_count": None}, "llama.attention.head_count is missing"),
    "config of another size": ({"feed_forward_length": 32}, r"ffn_gate.weight has shape \(64, 32\)"),
    "fewer layers": ({"block_count": 1}, r"tensor 'blk.1.attn_q.weight' \(and 8 more\) has no place"),
    "more layers": ({"block_count": 3}, "tensor blk.2.attn_norm.weight of shape .* is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_maths_and_other_shapes_are_refused_in_one_line(file, name, tmp_path):
    changes, message = REFUSED[name]
    file.metadata = {key: value for key, value in (file.metadata | changes).items() if value is not None}
    with pytest.raises(UserError, match=message) as caught:
        load_backbone(file.write(tmp_path / "model.gguf"), "float32")
    assert "\n" not in str(caught.value)


def test_other_architectures_are_refused_by_name(llama_state, tmp_path):
    path = GGUFModel("gemma3", llama_state).write(tmp_path / "model.gguf")
    with pytest.raises(UserError, match="architecture 'gemma3' is not supported; supported: llama, qwen2"):
        load_backbone(path, "float32")


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_q.weight", "token_embd.weight"])
def test_missing_extra_and_transposed_tensors_are_named(file, name, tmp_path):
    whole = dict(file.tensors)
    file.metadata["vocab_size"] = 19
    del file.tensors[name]
    with pytest.raises(UserError, match=f"tensor {name} of shape .* is missing"):
        load_backbone(file.write(tmp_path / "missing.gguf"), "float32")
    file.tensors = whole | {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    with pytest.raises(UserError, match="tensor 'blk.0.attn_q_norm.weight' has no place"):
        load_backbone(file.write(tmp_path / "extra.gguf"), "float32")
    file.tensors = whole | {"blk.0.ffn_down.weight": np.ones((64, 32), np.float32)}
    with pytest.raises(UserError, match=r"blk.0.ffn_down.weight has shape \(64, 32\), .* asks for \(32, 64\)"):
        load_backbone(file.write(tmp_path / "transposed.gguf"), "float32")


def test_files_that_are_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    for content, message in [
        (b"", "cannot be read as a GGUF file"),
        (b"<html>not found</html>", "is not a GGUF file"),
        (b"GGUF\x09\0\0\0" + bytes(16), "has GGUF version 9"),
        (b"GGUF\0\0\0\x03" + bytes(16), "has GGUF version 50331648"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_backbone(path, "float32")
    with pytest.raises(UserError, match="does not exist"):
        load_backbone(tmp_path / "nothing.gguf", "float32")


@pytest.fixture(scope="module")
def whole_file(llama_state, tmp_path_factory) -> bytes:
    file = GGUFModel("llama", llama_state)
    file.metadata["tokenizer.ggml.tokens"] = ["one", "two", "three"]
    return file.write(tmp_path_factory.mktemp("whole") / "model.gguf").read_bytes()


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_file_cut_anywhere_is_refused_in_one_line(whole_file, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "model.gguf"
    # Half of the cuts fall into the header, which is short.
    end = data.draw(st.one_of(st.integers(0, 2500), st.integers(0, len(whole_file) - 1)))
    path.write_bytes(whole_file[:end])
    with pytest.raises(UserError) as caught:
        load_backbone(path, "float32")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@given(st.data())
@settings(deadline=None, max_examples=80)
def test_an_altered_header_gives_no_other_error(whole_file, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("altered") / "model.gguf"
    content = bytearray(whole_file)
    content[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        load_backbone(path, "float32")
    except UserError as error:
        assert "\n" not in str(error)
