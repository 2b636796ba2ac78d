"""The optimiser of every kind of head, and the state that it changes."""

from typing import NamedTuple

import jax.numpy as jnp
import optax

from entmtp_jax.types import Array, Int, Params

WARMUP_SHARE = 0.05


class TrainState(NamedTuple):
    """Everything that training changes.

    Attributes:
      step: updates done, int32.
      params: float32.
      optimizer: state of the Optax optimiser.
    """

    step: Int[Array, ""]
    params: Params
    optimizer: optax.OptState


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    return TrainState(step=jnp.int32(0), params=params, optimizer=optimizer.init(params))


def learning_rates(peak: float, steps: int) -> optax.Schedule:
    """Linear warm-up over the first 5 % of the updates, then a cosine to zero (Loshchilov and Hutter 2017)."""
    warmup = max(1, round(steps * WARMUP_SHARE))
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1))


def build_optimizer(peak: float, steps: int, weight_decay: float) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) with ``learning_rates``.

    Args:
      peak: highest learning rate.
      steps: updates in all.
      weight_decay: times the learning rate.
    """
    return optax.adamw(learning_rates(peak, steps), weight_decay=weight_decay)
