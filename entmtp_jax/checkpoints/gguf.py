"""Loads a Llama-family backbone from a GGUF file (architectures ``llama`` and ``qwen2``)."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np

from entmtp_jax.backbone.rope import rope_frequencies
from entmtp_jax.checkpoints.gguf_container import GGUFFile, Value, read_gguf, read_tensor
from entmtp_jax.checkpoints.llama_names import EMBEDDING, FINAL_NORM, UNEMBED, TensorSource
from entmtp_jax.config import BackboneConfig, RopeScaling
from entmtp_jax.errors import UserError

ARCHITECTURES = ("llama", "qwen2")
ROPE_FACTORS = "rope_freqs.weight"
TOP_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": UNEMBED}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; a name that is not in the tables stays as it is.

    Example: ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``.
    """
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in LAYER_NAMES:
        return f"model.layers.{pieces[1]}.{LAYER_NAMES[pieces[2]]}.{pieces[3]}"
    return name


def half_split(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order that GGUF files of the ``llama`` architecture use for queries and keys.

    Such files rotate neighbouring rows (0,1), (2,3), ... of a head; the backbone rotates row i with row
    i + C/2. For one head of size 6 the rows ``a0 b0 a1 b1 a2 b2`` become ``a0 a1 a2 b0 b1 b2``.

    Args:
      rows: ``[heads*C, ...]``, weight or bias.
      num_heads: heads in it.

    Returns:
      The same array with the rows of every head reordered.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(rows.shape)


def load_gguf_config(path: Path) -> BackboneConfig:
    """The backbone's config from the metadata of a GGUF file; see ``open_gguf`` for the errors."""
    return config_from_gguf(read_gguf(path))


def open_gguf(path: Path) -> tuple[BackboneConfig, TensorSource]:
    """Reads the header of a GGUF file.

    Args:
      path: the file.

    Returns:
      The config, and the tensors by Hugging Face name; each is dequantised when it is read.

    Raises:
      UserError: another architecture, an option that is not supported, or a damaged file.
    """
    file = read_gguf(path)
    config = config_from_gguf(file)
    return config, _source(file, config)


def config_from_gguf(file: GGUFFile) -> BackboneConfig:
    """Reads ``{architecture}.*`` and ``tokenizer.ggml.*`` keys; whatever would change the maths is refused."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(file, f"{architecture}.")
    heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden // heads)
    _refuse_other_maths(keys, head_dim)
    embedding = file.tensors.get("token_embd.weight")
    config = BackboneConfig(
        vocab_size=embedding.shape[0] if embedding else keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("feed_forward_length"),
        num_layers=keys.count("block_count"),
        num_heads=heads,
        num_kv_heads=keys.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=keys.number("rope.freq_base", 10000.0),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        tie_embeddings="output.weight" not in file.tensors,
        max_positions=keys.count("context_length"),
        bos_id=_token(file, "bos"),
        eos_ids=tuple(dict.fromkeys(t for t in (_token(file, "eos"), _token(file, "eot")) if t is not None)),
    )
    return _with_rope_scaling(config, file, keys)


class _Keys:
    """Typed access to the metadata under one prefix, with errors that name file and key."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file, self.prefix = file, prefix

    def get(self, key: str, default: Value | None = None) -> Value | None:
        return self.file.metadata.get(self.prefix + key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, list):
            raise UserError(f"{self.file.path}: {self.prefix}{key} differs by layer; such models are not supported")
        if not isinstance(value, (int, float)):
            raise UserError(f"{self.file.path}: metadata {self.prefix}{key} is missing or not a number")
        # Files hold float32; the shortest decimal that rounds to it is what the model's author wrote.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def count(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise UserError(f"{self.file.path}: metadata {self.prefix}{key} must be positive, got {value}")
        return value


def _token(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return int(value) if isinstance(value, int) else None


def _refuse_other_maths(keys: _Keys, head_dim: int) -> None:
    """Refuses options under which the file's model is not the decoder implemented here."""
    path = keys.file.path
    if keys.integer("expert_count", 0):
        raise UserError(f"{path}: a mixture of experts is not supported")
    window = keys.integer("attention.sliding_window", 0)
    if 0 < window < keys.integer("context_length"):
        raise UserError(f"{path}: sliding-window attention ({window} tokens) is not supported")
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UserError(f"{path}: values of another size than keys are not supported")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise UserError(f"{path}: rotary embedding of a part of each head is not supported")


def _with_rope_scaling(config: BackboneConfig, file: GGUFFile, keys: _Keys) -> BackboneConfig:
    """Adds the RoPE scaling: linear from the metadata, llama3 recognised from its tensor of divisors."""
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise UserError(f"{file.path}: both {ROPE_FACTORS} and RoPE scaling {kind!r}; such a mix is not supported")
        return dataclasses.replace(config, rope_scaling=_recognise_llama3(config, file))
    if kind == "none" and factor != 1.0:
        kind = "linear"  # files from before the type was written
    if kind == "none":
        return config
    return dataclasses.replace(config, rope_scaling=RopeScaling(kind=str(kind), factor=factor))


def _recognise_llama3(config: BackboneConfig, file: GGUFFile) -> RopeScaling:
    """The file holds only the divisors; they must be those of the Llama 3.1 rule with its usual constants."""
    stored = read_tensor(file, ROPE_FACTORS)
    scaling = RopeScaling(kind="llama3", factor=float(stored.max()))
    rule = rope_frequencies(config) / rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    if stored.shape != rule.shape or not np.allclose(stored, rule, rtol=1e-4):
        raise UserError(f"{file.path}: the divisors in {ROPE_FACTORS} are not those of llama3 scaling; not supported")
    return scaling


def _source(file: GGUFFile, config: BackboneConfig) -> TensorSource:
    """The file's tensors by Hugging Face name, rows of queries and keys in the backbone's order."""
    theirs = {hugging_face_name(name): name for name in file.tensors if name != ROPE_FACTORS}
    interleaved = file.metadata["general.architecture"] == "llama"
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        value = read_tensor(file, theirs[name])
        projection = name.split(".")[-2]
        return half_split(value, heads[projection]) if interleaved and projection in heads else value

    shapes = {name: file.tensors[there].shape for name, there in theirs.items()}
    return TensorSource(str(file.path), shapes, read, _gguf_name)


def _gguf_name(name: str) -> str:
    """The inverse of ``hugging_face_name``, for messages."""
    back = {ours: theirs for theirs, ours in TOP_NAMES.items()}
    if name in back:
        return back[name]
    for theirs, ours in LAYER_NAMES.items():
        match = re.fullmatch(rf"model\.layers\.(\d+)\.{re.escape(ours)}\.(\w+)", name)
        if match:
            return f"blk.{match[1]}.{theirs}.{match[2]}"
    return name
