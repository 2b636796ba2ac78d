"""The transformer layer inside a head: of the backbone's family, with keys and values of its own."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from entmtp_jax.backbone.attention import Attend
from entmtp_jax.backbone.cache import KVCache, write_rows
from entmtp_jax.config import BackboneConfig
from entmtp_jax.types import Array, Bool, Float, Int, Params, RowInts


def block_config(backbone: BackboneConfig, intermediate_size: int) -> BackboneConfig:
    """Shape of one layer like the backbone's, with an MLP of its own size."""
    return dataclasses.replace(backbone, intermediate_size=intermediate_size, num_layers=1, taps=(), scan_layers=False)


def empty_cache(block: BackboneConfig, batch: int, slots: int) -> KVCache:
    """Keys and values ``[B, G, S, C]`` of one layer, float32 zeros."""
    shape = (batch, block.num_kv_heads, slots, block.head_dim)
    return KVCache(jnp.zeros(shape), jnp.zeros(shape))


def silent_layer(layer: Params) -> Params:
    """The same layer with its two output matrices at zero: it adds nothing to its input."""
    attention, mlp = layer["attention"], layer["mlp"]
    return layer | {
        "attention": attention | {"output": jnp.zeros_like(attention["output"])},
        "mlp": mlp | {"down": jnp.zeros_like(mlp["down"])},
    }


def one_layer(cache: KVCache) -> tuple[Array, Array]:
    """Keys and values ``[B, G, S, C]`` of a cache that holds one layer only."""
    return cast(Array, cache.keys), cast(Array, cache.values)


def embed(embedding: Float[Array, "V D"], tokens: Int[Array, "*any"]) -> Float[Array, "*any D"]:
    """Embeddings of tokens in float32; an empty node, which is never right, gets that of token 0."""
    return jnp.take(embedding, jnp.maximum(tokens, 0), axis=0).astype(jnp.float32)


def commit_entries(
    cache: KVCache, output: Float[Array, "B T D"], new: KVCache, starts: RowInts
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Writes the new keys and values into the cache, once the output that has read it is there.

    Without that order the compiler may write first, and keeps a copy of the whole cache for the reader. It is
    given as a sum with zero, since the compiler drops an ``optimization_barrier`` before it looks for copies.
    """
    wait = 0.0 * output[:, :1, :1, None]
    return output, write_rows(cache, jax.tree.map(lambda rows: rows + wait, new), starts)


def join_entries(above: KVCache | None, new: KVCache) -> KVCache:
    """Keys and values of nodes drafted before, then those of new ones."""
    if above is None:
        return new
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), above, new)


def attend_below(attend: Attend, above: KVCache | None, visible: Bool[Array, "1 n n"]) -> Attend:
    """Attention of a level's nodes to the text, to the nodes drafted above them and to themselves.

    The attention function takes as many queries as new keys, so the nodes above get empty queries.

    Args:
      attend: the attention function.
      above: keys and values of the nodes above, ``[B, G, n - P, C]``; None if there are none.
      visible: which of all drafted nodes sees which; the P nodes of the level come last.
    """

    def attend_level(
        query: Float[Array, "B P H C"],
        keys: Float[Array, "B G P C"],
        values: Float[Array, "B G P C"],
        self_mask: Bool[Array, "1 P P"],
        cached_keys: Float[Array, "B G S C"],
        cached_values: Float[Array, "B G S C"],
        lengths: RowInts,
    ) -> Float[Array, "B P H C"]:
        del self_mask  # part of ``visible``
        own_keys, own_values = one_layer(join_entries(above, KVCache(keys, values)))
        count = visible.shape[-1] - query.shape[1]
        padded = jnp.pad(query, ((0, 0), (count, 0), (0, 0), (0, 0)))
        return attend(padded, own_keys, own_values, visible, cached_keys, cached_values, lengths)[:, count:]

    return attend_level
