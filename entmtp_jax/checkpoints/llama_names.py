"""The one map between Hugging Face tensor names of the Llama family and the backbone's parameter tree.

=============================================  =================================================
Hugging Face name (matrices are [out, in])     place in the tree
=============================================  =================================================
model.embed_tokens.weight                      embed / embedding
model.layers.{i}.input_layernorm.weight        layer_{i} / attention_norm / scale
model.layers.{i}.self_attn.{q,k,v}_proj.weight layer_{i} / attention / qkv (grouped by kv head)
model.layers.{i}.self_attn.{q,k,v}_proj.bias   layer_{i} / attention / qkv_bias (if config.qkv_bias)
model.layers.{i}.self_attn.o_proj.weight       layer_{i} / attention / output
model.layers.{i}.post_attention_layernorm...   layer_{i} / mlp_norm / scale
model.layers.{i}.mlp.{gate,up}_proj.weight     layer_{i} / mlp / gate_up (rows of gate, then of up)
model.layers.{i}.mlp.down_proj.weight          layer_{i} / mlp / down
model.norm.weight                              final_norm / scale
lm_head.weight                                 unembed / kernel (unless tied)
=============================================  =================================================

Loaders of other formats translate their own names to the left column and use the same assembly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.types import Params

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
UNEMBED = "lm_head.weight"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Frequencies of the rotary embedding, saved as buffers by old versions of transformers; they follow from the config.
HARMLESS = re.compile(r"(model\.layers\.\d+\.self_attn\.|model\.)rotary_emb\.inv_freq")


class TensorSource(NamedTuple):
    """Where tensors come from: their shapes at once, their data one by one.

    Attributes:
      where: file or folder, for messages.
      shapes: shape of every tensor, by Hugging Face name.
      read: name -> array of that shape, of any float dtype.
      name_there: Hugging Face name -> the name in the file, for messages.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    name_there: Callable[[str], str] = str


def layer_name(layer: int, part: str) -> str:
    """Hugging Face name of a tensor of one layer, as ``layer_name(3, "mlp.up_proj.weight")``."""
    return f"model.layers.{layer}.{part}"


def layer_shapes(config: BackboneConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one layer by the part of the name after ``model.layers.{i}.``."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    if config.qkv_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (queries if p == "q" else keys,) for p in "qkv"}
    return shapes


def expected_shapes(config: BackboneConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face name and shape of every tensor that a checkpoint of this config must hold."""
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    of_a_layer = layer_shapes(config)
    for layer in range(config.num_layers):
        for part, shape in of_a_layer.items():
            yield layer_name(layer, part), shape
    yield FINAL_NORM, (config.hidden_size,)
    if not config.tie_embeddings:
        yield UNEMBED, (config.vocab_size, config.hidden_size)


def group_qkv(config: BackboneConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Stacks the three projections by key/value head: its query heads, then its key, then its value.

    Query head h belongs to key/value head h // r, with r query heads per key/value head. With 4 query
    heads and 2 key/value heads (r = 2)::

        group 0: q0 q1 k0 v0
        group 1: q2 q3 k1 v1

    Args:
      q: ``[H*C, ...]``; weights have a trailing D, biases nothing.
      k: ``[G*C, ...]``.
      v: ``[G*C, ...]``.

    Returns:
      ``[G, r + 2, C, ...]``.
    """
    groups, size, rest = config.num_kv_heads, config.head_dim, q.shape[1:]
    parts = [x.reshape(groups, -1, size, *rest) for x in (q, k, v)]
    return np.concatenate(parts, axis=1)


def split_qkv(config: BackboneConfig, qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inverse of ``group_qkv``: ``[G, r + 2, C, ...]`` to ``[H*C, ...]``, ``[G*C, ...]``, ``[G*C, ...]``."""
    rest, per_group = qkv.shape[3:], config.queries_per_kv
    q, k, v = qkv[:, :per_group], qkv[:, per_group], qkv[:, per_group + 1]
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def check_account(config: BackboneConfig, source: TensorSource) -> None:
    """Every tensor is accounted for: none missing, none extra, none of another shape.

    Raises:
      UserError: names the tensor, and the shapes where they differ.
    """
    expected: set[str] = set()
    for name, shape in expected_shapes(config):  # a damaged config may promise billions of layers: stop at the first
        if name not in source.shapes:
            raise UserError(f"{source.where}: tensor {source.name_there(name)} of shape {shape} is missing")
        actual = tuple(source.shapes[name])
        if actual != shape:
            there = source.name_there(name)
            raise UserError(f"{source.where}: tensor {there} has shape {actual}, but the config asks for {shape}")
        expected.add(name)
    extra = [name for name in source.shapes if name not in expected and not HARMLESS.fullmatch(name)]
    if config.tie_embeddings and UNEMBED in extra:
        extra.remove(UNEMBED)
        _check_tied(source)
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise UserError(f"{source.where}: tensor {source.name_there(extra[0])!r}{more} has no place in this model")


def _check_tied(source: TensorSource) -> None:
    """A tied checkpoint may repeat the embedding as output matrix, but only if they are the same."""
    if not np.array_equal(source.read(UNEMBED), source.read(EMBEDDING)):
        raise UserError(
            f"{source.where}: the config ties the embeddings, but {source.name_there(UNEMBED)} differs from "
            f"{source.name_there(EMBEDDING)}; set tie_word_embeddings to false in config.json"
        )


def params_from_tensors(config: BackboneConfig, source: TensorSource, dtype: str) -> Params:
    """Assembles the parameter tree from tensors by Hugging Face name.

    Args:
      config: shapes to expect.
      source: the tensors; each is read once, cast and forgotten, so the peak is the result and one layer.
      dtype: "float32" or "bfloat16"; the norm scales are float32 in both.

    Returns:
      Nested dict of NumPy arrays, layers unrolled.

    Raises:
      UserError: an unknown dtype; a missing, extra or misshapen tensor.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported for weights; choose one of {', '.join(DTYPES)}")
    check_account(config, source)

    def matrix(name: str) -> np.ndarray:
        return source.read(name).astype(DTYPES[dtype])

    def scale(name: str) -> dict[str, np.ndarray]:
        return {"scale": source.read(name).astype(np.float32)}

    params: dict[str, Params] = {"embed": {"embedding": matrix(EMBEDDING)}}
    for layer in range(config.num_layers):
        params[f"layer_{layer}"] = _assemble_layer(config, layer, matrix, scale)
    params["final_norm"] = scale(FINAL_NORM)
    if not config.tie_embeddings:
        params["unembed"] = {"kernel": matrix(UNEMBED)}
    return params


def _assemble_layer(
    config: BackboneConfig,
    layer: int,
    matrix: Callable[[str], np.ndarray],
    scale: Callable[[str], dict[str, np.ndarray]],
) -> Params:
    """One ``layer_{i}`` of the tree."""

    def stacked(parts: Iterable[str], suffix: str) -> list[np.ndarray]:
        return [matrix(layer_name(layer, f"{part}_proj.{suffix}")) for part in parts]

    qkv = ("self_attn.q", "self_attn.k", "self_attn.v")
    attention = {
        "qkv": group_qkv(config, *stacked(qkv, "weight")),
        "output": matrix(layer_name(layer, "self_attn.o_proj.weight")),
    }
    if config.qkv_bias:
        attention["qkv_bias"] = group_qkv(config, *stacked(qkv, "bias"))
    return {
        "attention_norm": scale(layer_name(layer, "input_layernorm.weight")),
        "attention": attention,
        "mlp_norm": scale(layer_name(layer, "post_attention_layernorm.weight")),
        "mlp": {
            "gate_up": np.concatenate(stacked(("mlp.gate", "mlp.up"), "weight")),
            "down": matrix(layer_name(layer, "mlp.down_proj.weight")),
        },
    }


def tensors_from_params(config: BackboneConfig, params: Params) -> dict[str, np.ndarray]:
    """The inverse of ``params_from_tensors``: every tensor by its Hugging Face name, layers unrolled."""
    tensors = {EMBEDDING: np.asarray(params["embed"]["embedding"])}
    for layer in range(config.num_layers):
        tree = params[f"layer_{layer}"]
        attention, mlp = tree["attention"], tree["mlp"]
        parts = {
            "input_layernorm.weight": tree["attention_norm"]["scale"],
            "self_attn.o_proj.weight": attention["output"],
            "post_attention_layernorm.weight": tree["mlp_norm"]["scale"],
            "mlp.gate_proj.weight": mlp["gate_up"][: config.intermediate_size],
            "mlp.up_proj.weight": mlp["gate_up"][config.intermediate_size :],
            "mlp.down_proj.weight": mlp["down"],
        }
        for suffix, name in (("weight", "qkv"), ("bias", "qkv_bias")):
            if name in attention:
                heads = zip("qkv", split_qkv(config, np.asarray(attention[name])), strict=True)
                parts |= {f"self_attn.{p}_proj.{suffix}": value for p, value in heads}
        tensors |= {layer_name(layer, part): np.asarray(value) for part, value in parts.items()}
    tensors[FINAL_NORM] = np.asarray(params["final_norm"]["scale"])
    if not config.tie_embeddings:
        tensors[UNEMBED] = np.asarray(params["unembed"]["kernel"])
    return tensors
