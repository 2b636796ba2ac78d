"""Entropy of next-token distributions and its bias-corrected moving average, in nats."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from entmtp_jax.types import Array, Float, Int, RowBools, RowFloats


def entropy_nats(logits: Float[Array, "*any V"]) -> Float[Array, "*any"]:
    """Shannon entropy of ``softmax(logits)``, ``-sum p log p``, untempered (EntMTP, section 3)."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    probs = jnp.exp(logprobs)
    # A forbidden token has log-probability -inf; its term is 0. Logits that hold NaN still give NaN.
    return -jnp.sum(jnp.where(probs == 0, 0.0, probs * logprobs), axis=-1)


class Average(NamedTuple):
    """Exponential moving average of one number per row, started at zero.

    Attributes:
      raw: ``[B]`` the biased average m_t.
      updates: ``[B]`` int32 number of updates t.
    """

    raw: RowFloats
    updates: Int[Array, " B"]


def empty_average(batch: int) -> Average:
    """No update yet: m_0 = 0."""
    return Average(raw=jnp.zeros(batch), updates=jnp.zeros(batch, jnp.int32))


def update_average(average: Average, value: RowFloats, decay: Float[Array, ""], live: RowBools) -> Average:
    """``m_t = decay * m_{t-1} + (1 - decay) * value`` where the row is live."""
    raw = decay * average.raw + (1 - decay) * value
    return Average(raw=jnp.where(live, raw, average.raw), updates=jnp.where(live, average.updates + 1, average.updates))


def corrected(average: Average, decay: Float[Array, ""]) -> RowFloats:
    """``m_t / (1 - decay**t)``: without the pull towards the zero start; 0 before the first update.

    For a constant value it equals that value from the first update on (methods of EntMTP; Adam, section 3).
    """
    weight = 1 - decay ** average.updates.astype(jnp.float32)
    return jnp.where(average.updates > 0, average.raw / jnp.maximum(weight, 1e-12), 0.0)
