"""The key/value cache: plain arrays, slot = position, handed in as an argument and back as a result.

Unrolled layers keep one array per layer (a slice of a stacked array would be copied at every use on
CPU); scanned layers keep one array with a leading layer axis. A slot at or past the row's length holds
nothing of value: it is masked when read and overwritten when the text reaches it, so finished rows and
padding may write there freely.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from entmtp_jax.config import BackboneConfig
from entmtp_jax.types import Array, Float, RowInts


class KVCache(NamedTuple):
    """Keys and values of the committed text.

    Attributes:
      keys: tuple of L arrays ``[B, G, S, C]``, or one array ``[L, B, G, S, C]`` when layers are scanned.
      values: like ``keys``.
    """

    keys: tuple[Array, ...] | Array
    values: tuple[Array, ...] | Array

    @property
    def num_slots(self) -> int:
        """Slots of every row."""
        return jax.tree.leaves(self.keys)[0].shape[-2]


def init_cache(config: BackboneConfig, *, batch: int, slots: int, dtype: DTypeLike) -> KVCache:
    """An empty cache of zeros."""
    shape = (batch, config.num_kv_heads, slots, config.head_dim)
    if config.scan_layers:
        shape = (config.num_layers, *shape)
        return KVCache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))
    layers = range(config.num_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers), values=tuple(jnp.zeros(shape, dtype) for _ in layers)
    )


def write_rows(cache: KVCache, new: KVCache, starts: RowInts) -> KVCache:
    """Writes ``T`` new slots of every row b at ``starts[b] .. starts[b] + T - 1``.

    The caller leaves T free slots after every start: ``dynamic_update_slice`` would otherwise shift
    the write back over valid slots. Rows are unrolled, since a vmapped update lowers to a scatter.

    Args:
      cache: the cache to update.
      new: keys and values of the new slots, shaped like the cache with T in place of S.
      starts: ``[B]``, int32.
    """

    def write(slots: Float[Array, "... S C"], rows: Float[Array, "... T C"]) -> Float[Array, "... S C"]:
        batch_axis = slots.ndim - 4
        rows = rows.astype(slots.dtype)
        for b in range(slots.shape[batch_axis]):
            row = jax.lax.slice_in_dim(rows, b, b + 1, axis=batch_axis)
            start = [jnp.int32(0)] * slots.ndim
            start[batch_axis], start[-2] = jnp.int32(b), starts[b]
            slots = jax.lax.dynamic_update_slice(slots, row, start)
        return slots

    return jax.tree.map(write, cache, new)


def gather_rows(new: KVCache, rows: Array) -> KVCache:
    """Picks new slots along the token axis: output slot e of batch row b is input slot ``rows[b, e]``.

    Args:
      new: keys and values of T tokens, shaped like a cache with T in place of S.
      rows: ``[B, E]``, int32.
    """
    # One gather over all layers instead of two per layer: it is small, and its overhead is per call.
    leaves, structure = jax.tree.flatten(new)
    stacked = jnp.stack(leaves)
    index = rows.reshape((1,) * (stacked.ndim - 4) + (rows.shape[0], 1, rows.shape[1], 1))
    picked = jnp.take_along_axis(stacked, index, axis=-2)
    return jax.tree.unflatten(structure, list(picked))
