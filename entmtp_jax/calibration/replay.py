"""Decoding replayed from a trace, without a model: how many tokens any bank and policy would emit per step.

A trace holds, for every position of texts that the backbone itself wrote, where the true tokens stand
among the heads' candidates, and the entropy. Which drafts a tree keeps follows from these alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from entmtp_jax.topology import RankPath, Topology


class Trace(NamedTuple):
    """Positions of several texts, text after text.

    Attributes:
      ranks: ``[n, K]`` int32: rank of the token at t+2+i among head i's candidates after position t; a
        number beyond every tree where there is no such token or the head does not score it.
      entropy_nats: ``[n]`` entropy of the backbone's distribution after position t.
      text: ``[n]`` which text a position belongs to; the positions of a text are consecutive.
    """

    ranks: np.ndarray
    entropy_nats: np.ndarray
    text: np.ndarray


class Replay(NamedTuple):
    """Totals of a replay.

    Attributes:
      tokens: emitted, less the first token of every text.
      steps: ``[M]`` steps by topology.
    """

    tokens: int
    steps: np.ndarray


def accepted_lengths(trace: Trace, topology: Topology) -> np.ndarray:
    """``[n]`` drafts that a step at each position would keep with this topology.

    Example: ranks ``[[0, 1], [2, 0]]`` and the tree ``{(0,), (1,), (0, 0)}``: the first position keeps 1
    (its second token stands at rank 1), the second none (rank 2 is not in the tree).
    """
    paths = set(topology.rank_paths)
    lengths = np.zeros(len(trace.ranks), np.int64)
    for depth in range(1, topology.depth + 1):
        present = np.asarray([path for path in paths if len(path) == depth])
        width = int(max(present.max(), trace.ranks[:, :depth].max())) + 1
        # Paths of one depth as single numbers, so that membership is one vector operation.
        places = width ** np.arange(depth)
        inside = np.isin(trace.ranks[:, :depth].astype(np.int64) @ places, present @ places)
        lengths[inside & (lengths == depth - 1)] = depth
    return lengths


def grow_topology(name: str, trace: Trace, num_nodes: int, *, max_depth: int, max_rank: int) -> Topology:
    """Greedy growth on measured path counts: add the node that most steps would keep, until there are enough.

    A path's count never exceeds its prefix's, and candidates are the next ranks only, so every tree on the
    way is valid (EntMTP, Algorithm 1, with counts of the true path in place of rollouts).

    Args:
      name: of the result.
      trace: what to count on.
      num_nodes: drafted nodes.
      max_depth: at most so deep.
      max_rank: highest rank used.
    """
    chosen: list[RankPath] = []
    frontier: dict[RankPath, int] = {(0,): _count(trace, (0,))}
    while len(chosen) < num_nodes and frontier:
        # Equal counts: the smaller sum of ranks, then the shallower path.
        best = min(frontier, key=lambda path: (-frontier[path], sum(path), len(path), path))
        del frontier[best]
        chosen.append(best)
        following = [(*best[:-1], best[-1] + 1)] if best[-1] < max_rank else []
        following += [(*best, 0)] if len(best) < max_depth else []
        frontier |= {path: _count(trace, path) for path in following}
    return Topology.from_paths(name, chosen)


def _count(trace: Trace, path: RankPath) -> int:
    return int((trace.ranks[:, : len(path)] == np.asarray(path)).all(axis=1).sum())


def replay_ladder(
    trace: Trace, lengths: np.ndarray, edges: Sequence[float], topology_by_bin: Sequence[int], decay: float
) -> Replay:
    """Walks every text as decoding would: choose by the entropy average, keep drafts, jump.

    Args:
      trace: the texts.
      lengths: ``[M, n]`` from ``accepted_lengths`` for every topology.
      edges: ascending, in nats.
      topology_by_bin: one more than edges.
      decay: of the bias-corrected average, one update per step.
    """
    steps = np.zeros(len(lengths), np.int64)
    tokens = 0
    bounds = np.flatnonzero(np.diff(trace.text, prepend=-1, append=-1))
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        place, raw, weight = start, 0.0, 0.0
        while place < end:
            raw = decay * raw + (1 - decay) * trace.entropy_nats[place]
            weight = decay * weight + (1 - decay)
            index = topology_by_bin[int(np.searchsorted(edges, raw / weight, side="right"))]
            steps[index] += 1
            emitted = int(lengths[index, place]) + 1
            tokens += min(emitted, end - place)
            place += emitted
    return Replay(tokens, steps)
