"""GGUF files written block by block, against plain decoders of every quantisation and against Hugging Face folders."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.checkpoints import load_backbone, load_config, tensors_from_params
from entmtp_jax.checkpoints.gguf import half_split, hugging_face_name
from entmtp_jax.checkpoints.gguf_container import READABLE, read_gguf, read_tensor
from entmtp_jax.config import RopeScaling
from entmtp_jax.errors import UserError

HEADS, KV_HEADS, LAYERS = 4, 2, 2
SIZES: dict[str, Any] = dict(
    vocab_size=19,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    name = name.removeprefix("model.").replace("layers.", "blk.")
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name.replace("norm.weight", "output_norm.weight") if name == "norm.weight" else name


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as files of the llama architecture hold them: 2i from the first half of a head, 2i + 1 from the second."""
    out, size = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


class File:
    """A GGUF file under construction; tests change metadata and tensors before it is written."""

    def __init__(self, architecture: str, state: dict[str, np.ndarray]) -> None:
        self.architecture = architecture
        self.metadata = {
            "block_count": LAYERS,
            "context_length": 64,
            "embedding_length": 32,
            "feed_forward_length": 64,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }
        self.tensors = {gguf_name(name): value for name, value in state.items()}
        if architecture == "llama":
            for name, value in self.tensors.items():
                heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else None
                self.tensors[name] = value if heads is None else interleave(value, heads)

    def write(self, path, kinds: dict[str, Kind] | None = None):
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            key = key if key.startswith("tokenizer.") else f"{self.architecture}.{key}"
            add[type(value)](key, value)
        for name, value in self.tensors.items():
            kind = (kinds or {}).get(name, Kind.F32)
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def random_state(family: str, tie: bool) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[family]
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, tie_word_embeddings=tie))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    return {name: value for name, value in state.items() if not (tie and name == "lm_head.weight")}


@pytest.fixture(scope="module")
def llama_state() -> dict[str, np.ndarray]:
    return random_state("llama", tie=False)


@pytest.fixture
def file(llama_state) -> File:
    return File("llama", llama_state)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_tensor_and_the_config(family, tie, tmp_path):
    state = random_state(family, tie)
    path = File(family, state).write(tmp_path / "model.gguf")
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


# Plain decoders, one block at a time, from the published layouts of the blocks.


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, at)[0])


def nibbles(data: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def fifth_bits(data: bytes) -> list[int]:
    word = int.from_bytes(data, "little")
    return [(word >> i) & 1 for i in range(32)]


def decode_q8_0(block):
    return [half(block, 0) * (byte - 256 if byte > 127 else byte) for byte in block[2:]]


def decode_q4_0(block):
    return [half(block, 0) * (q - 8) for q in nibbles(block[2:])]


def decode_q4_1(block):
    return [half(block, 0) * q + half(block, 2) for q in nibbles(block[4:])]


def decode_q5_0(block):
    bits = fifth_bits(block[2:6])
    return [half(block, 0) * (q + 16 * bit - 16) for q, bit in zip(nibbles(block[6:]), bits, strict=True)]


def decode_q5_1(block):
    bits = fifth_bits(block[4:8])
    return [half(block, 0) * (q + 16 * bit) + half(block, 2) for q, bit in zip(nibbles(block[8:]), bits, strict=True)]


def k_scales(packed: bytes) -> list[tuple[int, int]]:
    """Eight pairs of 6-bit scale and minimum out of 12 bytes."""
    pairs = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    for j in range(4):
        low = packed[j + 8]
        pairs.append(((low & 15) | (packed[j] >> 6) << 4, (low >> 4) | (packed[j + 4] >> 6) << 4))
    return pairs


def decode_k(block, bits_at, quants_at):
    values = []
    for sub, (scale, minimum) in enumerate(k_scales(block[4:16])):
        for i in range(32):
            byte = block[quants_at + 32 * (sub // 2) + i]
            q = byte >> 4 if sub % 2 else byte & 15
            if bits_at is not None:
                q += 16 * ((block[bits_at + i] >> sub) & 1)
            values.append(half(block, 0) * scale * q - half(block, 2) * minimum)
    return values


def decode_q4_k(block):
    return decode_k(block, None, 16)


def decode_q5_k(block):
    return decode_k(block, 16, 48)


def decode_q6_k(block):
    values = []
    for i in range(256):
        part, place, lane = i // 128, i % 128 // 32, i % 32
        low = block[64 * part + 32 * (place % 2) + lane] >> (4 * (place // 2)) & 15
        high = block[128 + 32 * part + lane] >> (2 * place) & 3
        scale = np.frombuffer(block, np.int8, 16, 192)[i // 16]
        values.append(half(block, 208) * int(scale) * ((low | high << 4) - 32))
    return values


def decode_bf16(block):
    return [float(np.frombuffer(b"\0\0" + block, np.float32)[0])]


DECODERS = {
    "F32": (4, [], lambda block: np.frombuffer(block, np.float32).tolist()),
    "F16": (2, [0], lambda block: [half(block, 0)]),
    "BF16": (2, [], decode_bf16),
    "Q8_0": (34, [0], decode_q8_0),
    "Q4_0": (18, [0], decode_q4_0),
    "Q4_1": (20, [0, 2], decode_q4_1),
    "Q5_0": (22, [0], decode_q5_0),
    "Q5_1": (24, [0, 2], decode_q5_1),
    "Q4_K": (144, [0, 2], decode_q4_k),
    "Q5_K": (176, [0, 2], decode_q5_k),
    "Q6_K": (210, [208], decode_q6_k),
}


def random_blocks(kind: str, count: int) -> list[bytes]:
    """Random bytes with finite numbers where a block holds floats."""
    generator = np.random.default_rng(len(kind) + count)
    size, halves, _ = DECODERS[kind]
    if kind in ("F32", "BF16"):
        floats = generator.normal(size=count).astype(np.float32)
        return [value.tobytes()[-size:] for value in floats]
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = generator.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
    return [block.tobytes() for block in blocks]


def test_a_decoder_for_every_readable_kind():
    assert set(DECODERS) == set(READABLE)


@pytest.mark.parametrize("rows", [1, 6, 35])
@pytest.mark.parametrize("kind", READABLE)
def test_every_kind_is_decoded_as_its_layout_says(kind, rows, tmp_path):
    block_values = gguf.GGML_QUANT_SIZES[Kind[kind]][0]
    per_row = 512 // block_values
    blocks = random_blocks(kind, rows * per_row)
    data = np.frombuffer(b"".join(blocks), np.uint8).reshape(rows, -1)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "one.gguf")
    assert file.tensors["x"].shape == (rows, 512)
    expected = np.array([DECODERS[kind][2](block) for block in blocks]).reshape(rows, 512)
    np.testing.assert_allclose(read_tensor(file, "x"), expected, rtol=2e-6, atol=1e-5)


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
    path = File("gemma3", llama_state).write(tmp_path / "model.gguf")
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


def test_a_kind_that_cannot_be_read_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("x", np.zeros((1, 98), np.uint8), raw_dtype=Kind.IQ3_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="tensor 'x' has type IQ3_XXS; readable types: F32"):
        read_gguf(tmp_path / "model.gguf")


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
    file = File("llama", llama_state)
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
