"""Chooses the thresholds of an entropy ladder from a trace and from step times measured on this device."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from entmtp_jax.bank import Bank
from entmtp_jax.calibration.growth import step_starts
from entmtp_jax.calibration.replay import Trace, accepted_lengths, replay
from entmtp_jax.scheduler import MAX_BINS, ladder

QUANTILES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # of the entropies, where an edge may lie
COST_NOISE = 0.05  # medians of step times differ by so much between runs on a shared machine
DISCOUNTS = (0.0, 0.15, 0.3)  # of what a step costs above the cheapest one; a higher one tries wider trees


class Ladder(NamedTuple):
    """A fitted ladder.

    Attributes:
      edges_nats: ascending.
      topology_by_bin: names, one more than edges.
      tokens_per_s: expected by replay and measured costs.
      tokens_per_step: likewise.
    """

    edges_nats: tuple[float, ...]
    topology_by_bin: tuple[str, ...]
    tokens_per_s: float
    tokens_per_step: float


def fit_ladder(trace: Trace, bank: Bank, step_ms: Mapping[str, float], *, window: float, max_edges: int = 2) -> Ladder:
    """The best ladder of up to ``max_edges`` edges at quantiles of the trace's entropies.

    Best is the most tokens per second; among ladders that the noise of the costs cannot tell apart, the most
    tokens per step.

    Args:
      trace: of held-out text.
      bank: its topologies.
      step_ms: measured cost of a step of each topology, by name.
      window: W of the entropy average, in steps.
      max_edges: more edges are tried only as long as they help.
    """
    lengths = np.stack([accepted_lengths(trace.ranks, topology) for topology in bank.topologies])
    starts = np.stack([step_starts(kept, trace.bounds) for kept in lengths])
    costs = np.asarray([step_ms[topology.name] for topology in bank.topologies])
    grid = sorted({round(float(q), 4) for q in np.quantile(trace.entropy_nats, QUANTILES)})
    counts = range(min(max_edges, MAX_BINS - 1) + 1)
    every_edges = [edges for count in counts for edges in itertools.combinations(grid, count)]
    tried = [
        (edges, _best_by_bin(trace, lengths, starts, costs - discount * (costs - costs.min()), edges))
        for discount, edges in itertools.product(DISCOUNTS, every_edges)
    ]
    policies = [ladder(bins, edges, num_topologies=len(costs), window=window) for edges, bins in tried]
    steps = replay(trace, bank.topologies, policies).steps.sum(axis=1)
    tokens = int(trace.bounds[-1])  # that steps emit, whatever the policy
    candidates = [
        Ladder(
            edges_nats=edges,
            topology_by_bin=tuple(bank.topologies[index].name for index in bins),
            tokens_per_s=tokens / (float(taken @ costs) / 1e3),  # costs are in milliseconds
            tokens_per_step=tokens / int(taken.sum()),
        )
        for (edges, bins), taken in zip(tried, steps, strict=True)
    ]
    fastest = max(fitted.tokens_per_s for fitted in candidates)
    as_fast = [fitted for fitted in candidates if fitted.tokens_per_s >= (1 - COST_NOISE) * fastest]
    return max(as_fast, key=lambda fitted: (fitted.tokens_per_step, fitted.tokens_per_s))


def _best_by_bin(
    trace: Trace, lengths: np.ndarray, starts: np.ndarray, costs: np.ndarray, edges: Sequence[float]
) -> list[int]:
    """For every bin of the momentary entropy the topology with the best rate.

    The rate is not tokens over cost of the bin alone: what counts is the gain over the overall rate, so
    each bin takes the topology with the largest ``tokens - rate * cost`` at the best fixed topology's rate, over
    the positions at which that one's steps start (inside what a step keeps, no other step starts).
    """
    rates = lengths.shape[1] / (starts.sum(axis=1) * costs)
    rate, lengths = rates.max(), lengths[:, starts[rates.argmax()]]
    bins = np.searchsorted(edges, trace.entropy_nats[starts[rates.argmax()]], side="right")
    chosen = []
    for index in range(len(edges) + 1):
        here = lengths[:, bins == index]
        gain = (here.mean(axis=1) if here.size else lengths.mean(axis=1)) + 1 - rate * costs
        chosen.append(int(np.argmax(gain)))
    return chosen
