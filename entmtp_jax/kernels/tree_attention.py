"""Attention of a draft tree to the filled part of the cache on the CPU, by a C++ kernel that XLA calls.

XLA's products read every slot of the cache, filled or not, and spread over many small operations. The kernel
(``tree_attention.cc``, beside this file) reads the filled slots once per key/value head and does the rest in registers.
Where ``KERNEL.build`` returns False the caller stays with ``two_part_attention``.
"""

import jax
import jax.numpy as jnp

from entmtp_jax.kernels.library import KernelLibrary
from entmtp_jax.types import Array, Bool, Float, RowInts

KERNEL = KernelLibrary("tree_attention", symbol="EntmtpTreeAttention")


def attend(
    query: Float[Array, "B T H C"],
    keys: Float[Array, "B G T C"],
    values: Float[Array, "B G T C"],
    self_mask: Bool[Array, "#B T T"],
    cached_keys: Float[Array, "B G S C"],
    cached_values: Float[Array, "B G S C"],
    lengths: RowInts,
) -> Float[Array, "B T H C"]:
    """Softmax attention over the committed slots and the new tokens: ``two_part_attention`` on a CPU.

    All arithmetic is float32; bfloat16 keys and values are widened exactly. A token's result has the
    same bits whether its ancestors lie in the cache or are new, and whatever other tokens there are:
    the order of summation depends on the sequence of the keys it sees alone. A token that sees
    nothing gets zeros.

    Args:
      query: rotated queries of the T new tokens, float32.
      keys: rotated keys of the new tokens, float32 or bfloat16 as the cache.
      values: values of the new tokens, as the keys.
      self_mask: ``[i, j]`` is True where new token i may see new token j; j in ascending order.
      cached_keys: keys of the committed text; slots from ``lengths`` on are not read.
      cached_values: values of the committed text, likewise.
      lengths: ``[B]`` committed slots of each row, int32.

    Returns:
      Array of shape ``[B, T, H, C]``, float32.

    Raises:
      RuntimeError: ``KERNEL.build`` has not succeeded in this process.
      TypeError: a dtype other than those above.
    """
    dtypes = {array.dtype.name for array in (keys, values, cached_keys, cached_values)}
    if query.dtype != jnp.float32 or dtypes not in ({"float32"}, {"bfloat16"}):
        raise TypeError(
            "query must be float32, keys and values all float32 or all bfloat16, "
            f"not {query.dtype} and {', '.join(sorted(dtypes))}"
        )
    result = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    return KERNEL.call(result, query, keys, values, self_mask, cached_keys, cached_values, lengths.astype(jnp.int32))
