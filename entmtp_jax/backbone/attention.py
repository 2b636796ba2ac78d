"""Attention of new tokens to the cache (read-only) and to each other."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp

from entmtp_jax.kernels import tree_attention
from entmtp_jax.types import Array, Bool, Float, RowInts

EXACT = jax.lax.Precision.HIGHEST  # float32 operands as float32, on a TPU too; bfloat16 ones are not affected
MASKED = -1e30  # finite, so that a row of masked scores stays free of NaN


# The attention function that a backbone is built with: arguments and result as ``two_part_attention``'s.
Attend: TypeAlias = Callable[[Array, Array, Array, Array, Array, Array, RowInts], Array]


def two_part_attention(
    query: Float[Array, "B T H C"],
    keys: Float[Array, "B G T C"],
    values: Float[Array, "B G T C"],
    self_mask: Bool[Array, "#B T T"],
    cached_keys: Float[Array, "B G S C"],
    cached_values: Float[Array, "B G S C"],
    lengths: RowInts,
) -> Float[Array, "B T H C"]:
    """Softmax attention over the committed slots and the new tokens without joining the two.

    Query head h reads key/value head ``h // (H // G)``. Scores and the softmax are float32.

    Args:
      query: rotated queries of the T new tokens.
      keys: rotated keys of the new tokens.
      values: values of the new tokens.
      self_mask: ``[i, j]`` is True where new token i may see new token j.
      cached_keys: keys of the committed text; read only.
      cached_values: values of the committed text; read only.
      lengths: ``[B]`` committed slots of each row; all of them are seen.
    """
    batch, tokens, num_heads, head_dim = query.shape
    groups = keys.shape[1]
    repeats = num_heads // groups
    # [B, G, r*T, C]: the queries of one key/value head become rows of one matrix product.
    grouped = query.reshape(batch, tokens, groups, repeats, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = (grouped * head_dim**-0.5).reshape(batch, groups, repeats * tokens, head_dim)

    committed = _scores(grouped, cached_keys)
    visible = jnp.arange(cached_keys.shape[2]) < lengths[:, None]
    committed = jnp.where(visible[:, None, None], committed, MASKED)
    own = _scores(grouped, keys).reshape(batch, groups, repeats, tokens, tokens)
    own = jnp.where(self_mask[:, None, None], own, MASKED).reshape(batch, groups, repeats * tokens, tokens)

    top = jnp.maximum(committed.max(-1, keepdims=True), own.max(-1, keepdims=True))
    committed, own = jnp.exp(committed - top), jnp.exp(own - top)
    total = committed.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
    mixed = (_mix(committed, cached_values) + _mix(own, values)) / total
    mixed = mixed.reshape(batch, groups, repeats, tokens, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, tokens, num_heads, head_dim)


def _scores(query: Float[Array, "B G X C"], keys: Float[Array, "B G S C"]) -> Float[Array, "B G X S"]:
    query = query.astype(keys.dtype)
    return jnp.einsum("bgxc,bgsc->bgxs", query, keys, precision=EXACT, preferred_element_type=jnp.float32)


def _mix(weights: Float[Array, "B G X S"], values: Float[Array, "B G S C"]) -> Float[Array, "B G X C"]:
    weights = weights.astype(values.dtype)
    return jnp.einsum("bgxs,bgsc->bgxc", weights, values, precision=EXACT, preferred_element_type=jnp.float32)


def choose_attend(cache: Path) -> Attend:
    """The attention function for this machine: on a CPU the kernel if it can be built, else ``two_part_attention``.

    Args:
      cache: where the compiled kernel is kept.
    """
    if jax.default_backend() == "cpu" and tree_attention.KERNEL.build(cache):
        return tree_attention.attend
    return two_part_attention


def causal_mask(tokens: int) -> Bool[Array, "1 T T"]:
    """Each token sees itself and those before it: the self-mask of a prefill chunk."""
    return jnp.tril(jnp.ones((1, tokens, tokens), bool))
