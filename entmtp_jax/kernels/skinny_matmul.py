"""A few rows times a large weight matrix on the CPU, by a C++ kernel that XLA calls through its foreign functions.

XLA's CPU matrix product is fine for one row but takes several times as long for the 2 to 32 rows of a draft tree. The
kernel (``skinny_matmul.cc``, beside this file) reads every weight once, whatever the number of rows. Where
``KERNEL.build`` returns False the caller stays with ``jax.lax.dot_general``.
"""

import jax
import jax.numpy as jnp

from entmtp_jax.kernels.library import KernelLibrary
from entmtp_jax.types import Array, Float

KERNEL = KernelLibrary("skinny_matmul", symbol="EntmtpSkinnyMatmul")


def linear(x: Float[Array, "T K"], w: Float[Array, "O K"]) -> Float[Array, "T O"]:
    """The product of rows and transposed weights, ``y[t, o] = sum_k x[t, k] w[o, k]``, in float32.

    A row's result has the same bits alone and among other rows, and for bfloat16 weights the same
    bits as for their float32 copies: the order of summation depends on K alone.

    Args:
      x: rows, float32.
      w: weights, float32 or bfloat16 (widened exactly; all arithmetic is float32).

    Returns:
      Array of shape ``[T, O]``, float32.

    Raises:
      RuntimeError: ``KERNEL.build`` has not succeeded in this process.
      TypeError: a dtype other than those above.
    """
    if x.dtype != jnp.float32 or w.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x must be float32 and w float32 or bfloat16, not {x.dtype} and {w.dtype}")
    return KERNEL.call(jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32), x, w)
