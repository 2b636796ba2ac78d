"""Checkpoint files for tests, written without the package: GGUF files and SentencePiece models."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

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


class GGUFModel:
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


def write_tokenizer_gguf(path: Path, **changes) -> Path:
    """A GGUF file with metadata only; None removes a key."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in changes.items():
        key = "tokenizer." + key if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
            add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "abc", "\u2581ab", "é", "\u2581\u2581", "<|user|>"]
SCORES = [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0, -6.0, 0.0]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
TYPES = [2, 3, 3, *[6] * 256, *[1] * 11, 4]
PIECE_SCORES = [0.0] * 259 + SCORES


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, value: int | bytes | float) -> bytes:
    """One field of a protocol-buffer message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece_file(kind: int = 2, charsmap: bytes = b"", trim: int = 0, prefix: int = 1) -> bytes:
    rows = zip(TOKENS, PIECE_SCORES, TYPES, strict=True)
    pieces = [field(1, field(1, t.encode()) + field(2, s) + (b"" if k == 1 else field(3, k))) for t, s, k in rows]
    normaliser = field(1, b"identity") + field(2, charsmap) + field(3, prefix) + field(4, trim)
    return b"".join(pieces) + field(2, field(1, b"corpus.txt") + field(3, kind)) + field(3, normaliser)
