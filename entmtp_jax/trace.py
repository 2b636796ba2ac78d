"""What happened in each decoding step, kept on the device for reports, the notebook and the replay."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from entmtp_jax.types import Array, Float, Int, RowBools, RowInts


class Trace(NamedTuple):
    """One entry per step of a row; entries past its step count are zeros.

    Attributes:
      topology: ``[B, F]`` int32 index in the bank.
      accepted: ``[B, F]`` int32 drafts kept: the accepted length, less what EOS or a limit cut off.
      emitted: ``[B, F]`` int32 tokens emitted: the kept drafts and, unless cut off, the bonus token.
      signals: ``[B, F, Q]`` what the choice was made from.
    """

    topology: Int[Array, "B F"]
    accepted: Int[Array, "B F"]
    emitted: Int[Array, "B F"]
    signals: Float[Array, "B F Q"]


class StepRecord(NamedTuple):
    """What one step adds to the trace; fields as there, without the step axis."""

    topology: RowInts
    accepted: RowInts
    emitted: RowInts
    signals: Float[Array, "B Q"]


def empty_trace(batch: int, steps: int, num_signals: int) -> Trace:
    """Room for so many steps."""
    return Trace(
        topology=jnp.zeros((batch, steps), jnp.int32),
        accepted=jnp.zeros((batch, steps), jnp.int32),
        emitted=jnp.zeros((batch, steps), jnp.int32),
        signals=jnp.zeros((batch, steps, num_signals)),
    )


def record(trace: Trace, step: StepRecord, index: RowInts, live: RowBools) -> Trace:
    """Writes a step into the trace of every live row.

    Args:
      trace: so far.
      step: what happened.
      index: ``[B]`` number of the step in its row, from 0.
      live: ``[B]`` rows that took part.
    """
    here = (jnp.arange(trace.topology.shape[1]) == index[:, None]) & live[:, None]

    def write(values: Array, value: Array) -> Array:
        place = here.reshape(here.shape + (1,) * (values.ndim - 2))
        return jnp.where(place, value[:, None], values)

    return Trace(*jax.tree.map(write, tuple(trace), tuple(step)))
