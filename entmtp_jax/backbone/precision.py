"""How matrices are multiplied: one function per kind, and the choice among them by a quick probe.

Weights are ``[out, in]``. Every kind accumulates in float32 and returns float32; ``float32`` means
``Precision.HIGHEST`` on every platform, so that it is real float32 on TPU too.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from entmtp_jax.types import Array, Float


class Linear(Protocol):
    """``(x[..., in], weight[out, in]) -> y[..., out]`` in float32."""

    def __call__(self, x: Float[Array, "*any I"], weight: Float[Array, "O I"]) -> Float[Array, "*any O"]: ...


def linear_highest(x: Float[Array, "*any I"], weight: Float[Array, "O I"]) -> Float[Array, "*any O"]:
    """Float32 product at the highest precision of the platform."""
    return _contract(x.astype(jnp.float32), weight.astype(jnp.float32), jax.lax.Precision.HIGHEST)


def linear_bfloat16(x: Float[Array, "*any I"], weight: Float[Array, "O I"]) -> Float[Array, "*any O"]:
    """Product of bfloat16 operands with float32 accumulation and result."""
    return _contract(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), jax.lax.Precision.DEFAULT)


def linear_bfloat16_two_rows(x: Float[Array, "*any I"], weight: Float[Array, "O I"]) -> Float[Array, "*any O"]:
    """``linear_bfloat16`` that never multiplies a single row.

    XLA's CPU backend turns a one-row bfloat16 product into a scalar loop (200 ms for the matrices of a
    135M model, 30-60 ms for two rows), so a lone row is doubled.
    """
    rows = x.size // x.shape[-1]
    if rows > 1:
        return linear_bfloat16(x, weight)
    doubled = jnp.concatenate([x.reshape(1, -1)] * 2)
    return linear_bfloat16(doubled, weight)[:1].reshape(*x.shape[:-1], weight.shape[0])


def _contract(
    x: Float[Array, "*any I"], weight: Float[Array, "O I"], precision: jax.lax.Precision
) -> Float[Array, "*any O"]:
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32)
