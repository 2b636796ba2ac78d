"""Policies as data: a signal, bin edges and a table pick the topology of the next step.

A policy is a NamedTuple of small arrays that the compiled loop takes as an argument, so changing it
never recompiles. Fixed, ladder and hysteresis policies are tables of one form, indexed by the topology
of the previous step and the bin of the signal.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.types import Array, Float, Int, RowBools, RowInts

MAX_BINS = 8
UNFORCED = -1
DEFAULT_WINDOW = 4.0  # EntMTP, methods: the shortest of the authors' windows


class Signal(IntEnum):
    """Columns of the signals array; each is per row and known before the step it decides."""

    ENTROPY_EMA = 0  # bias-corrected EMA of the entropy at the roots, nats
    ENTROPY = 1  # entropy of the distribution that the current root was taken from, nats
    TOP1_PROB = 2  # backbone's probability of its best token there
    ACCEPTED_EMA = 3  # bias-corrected EMA of the accepted lengths of steps that drafted
    PATH_VALUE = 4  # heads' probability of their greedy chain (fresh timing; 0 with stale timing)


NUM_SIGNALS = len(Signal)


class Policy(NamedTuple):
    """What decides the topology of a step.

    Attributes:
      signal: ``[]`` int32, a ``Signal``.
      edges: ``[MAX_BINS - 1]`` ascending upper edges of the bins in the signal's unit, padded with inf;
        a value equal to an edge falls into the bin above it.
      table: ``[M, MAX_BINS]`` int32: topology index by (previous topology, bin).
      decay: ``[]`` decay of the moving averages, ``1 - 1 / window``.
      forced: ``[F]`` int32 topology index of step i, or ``UNFORCED``; for tests and replay. Steps past
        the end are unforced.
    """

    signal: Int[Array, ""]
    edges: Float[Array, " bins"]
    table: Int[Array, "M bins"]
    decay: Float[Array, ""]
    forced: Int[Array, " F"]


FORCED_STEPS = 1024  # length of ``Policy.forced``; fixed, so that forcing never recompiles


def ladder(
    topology_by_bin: Sequence[int],
    edges: Sequence[float],
    *,
    num_topologies: int,
    signal: Signal = Signal.ENTROPY_EMA,
    window: float = DEFAULT_WINDOW,
) -> Policy:
    """The bin alone decides: EntMTP's threshold ladder.

    Args:
      topology_by_bin: topology index of each bin, bins ascending in the signal.
      edges: one fewer than bins, ascending, in the signal's unit.
      num_topologies: M, topologies in the bank.
      signal: what is compared with the edges.
      window: W of the moving averages, in steps.

    Raises:
      UserError: counts do not fit, edges do not ascend, or an index is outside the bank.
    """
    return hysteresis([topology_by_bin] * num_topologies, edges, signal=signal, window=window)


def fixed(index: int, *, num_topologies: int, window: float = DEFAULT_WINDOW) -> Policy:
    """Always the same topology."""
    return ladder([index], [], num_topologies=num_topologies, window=window)


def hysteresis(
    table: Sequence[Sequence[int]],
    edges: Sequence[float],
    *,
    signal: Signal = Signal.ENTROPY_EMA,
    window: float = DEFAULT_WINDOW,
) -> Policy:
    """The previous topology and the bin decide: a band in which the previous choice is kept.

    Example: two topologies, small (0) and large (1); the signal is an entropy; go to the small one at
    2.0 nats and above, back to the large one below 1.0, and keep the present one between:
    ``hysteresis([[1, 0, 0], [1, 1, 0]], edges=[1.0, 2.0])``.

    Args:
      table: ``table[previous][bin]``; one row per topology of the bank.
      edges: as in ``ladder``.
      signal: what is compared with the edges.
      window: W of the moving averages, in steps.
    """
    num_topologies, bins = len(table), len(edges) + 1
    if bins > MAX_BINS:
        raise UserError(f"a policy has at most {MAX_BINS} bins; {bins} were given")
    if any(len(row) != bins for row in table):
        raise UserError(f"{len(edges)} edges make {bins} bins, but a table row has another number of entries")
    if list(edges) != sorted(edges) or not all(np.isfinite(edges)):
        raise UserError(f"policy edges must be finite and ascend; got {list(edges)}")
    bad = [index for row in table for index in row if not 0 <= index < num_topologies]
    if bad:
        raise UserError(f"a policy names topology {bad[0]}, but the bank holds {num_topologies}")
    if window < 1:
        raise UserError(f"the averaging window must be at least 1 step; got {window}")
    padded = np.asarray([[*row, *[row[-1]] * (MAX_BINS - bins)] for row in table], np.int32)
    return Policy(
        signal=jnp.int32(signal),
        edges=jnp.asarray([*edges, *[np.inf] * (MAX_BINS - bins)], jnp.float32),
        table=jnp.asarray(padded),
        decay=jnp.float32(1 - 1 / window),
        forced=jnp.full(FORCED_STEPS, UNFORCED, jnp.int32),
    )


def force(policy: Policy, indices: Sequence[int]) -> Policy:
    """The policy with the topologies of its first steps given; for tests and replay."""
    if len(indices) > FORCED_STEPS:
        raise UserError(f"at most {FORCED_STEPS} steps can be forced; {len(indices)} were given")
    bad = [index for index in indices if not UNFORCED <= index < policy.table.shape[0]]
    if bad:
        raise UserError(f"forced topology {bad[0]} is outside the bank of {policy.table.shape[0]}")
    return policy._replace(forced=policy.forced.at[: len(indices)].set(jnp.asarray(indices, jnp.int32)))


def reachable(policy: Policy) -> list[int]:
    """Indices of the topologies that a policy can name, and of the first, which every text starts from."""
    forced = np.asarray(policy.forced)
    return sorted({0, *np.unique(policy.table).tolist(), *np.unique(forced[forced != UNFORCED]).tolist()})


def renumber(policy: Policy, kept: Sequence[int]) -> Policy:
    """The same policy for a bank of which only some topologies are left.

    Example: of four topologies 0, 2 and 3 are kept; then index 2 becomes 1, and 3 becomes 2.

    Args:
      policy: for the whole bank.
      kept: indices there, ascending; all that are ``reachable``.

    Raises:
      UserError: the policy can name a topology that is not kept.
    """
    if missing := set(reachable(policy)) - set(kept):
        raise UserError(f"the policy can choose topology {min(missing)}, which is not kept")
    table, forced = np.asarray(policy.table)[list(kept)], np.asarray(policy.forced)
    forced = np.where(forced == UNFORCED, UNFORCED, np.searchsorted(kept, forced))
    return policy._replace(
        table=jnp.asarray(np.searchsorted(kept, table), jnp.int32), forced=jnp.asarray(forced, jnp.int32)
    )


def choose(
    policy: Policy, signals: Float[Array, "B Q"], previous: RowInts, steps: RowInts, live: RowBools
) -> Int[Array, ""]:
    """One topology index for the whole batch.

    The batch shares one step, so its live rows vote by the mean of their signals; previous topology and
    step count are those of the first live row.

    Args:
      policy: what decides.
      signals: per row, see ``Signal``.
      previous: ``[B]`` topology index of each row's last step.
      steps: ``[B]`` steps done so far.
      live: ``[B]`` rows that still decode.
    """
    value = jnp.sum(jnp.where(live, signals[:, policy.signal], 0.0)) / jnp.maximum(live.sum(), 1)
    bin_index = jnp.searchsorted(policy.edges, value, side="right", method="compare_all")
    first = jnp.argmax(live)
    chosen = policy.table[previous[first], jnp.minimum(bin_index, MAX_BINS - 1)]
    step = steps[first]
    forced = jnp.where(step < policy.forced.shape[0], policy.forced[jnp.minimum(step, FORCED_STEPS - 1)], UNFORCED)
    return jnp.where(forced == UNFORCED, chosen, forced)
