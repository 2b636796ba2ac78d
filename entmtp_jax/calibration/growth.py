"""Trees grown on a trace: which nodes most steps would keep."""

import numpy as np

from entmtp_jax.calibration.replay import Trace, accepted_lengths
from entmtp_jax.topology import RankPath, Topology
from entmtp_jax.types import Bool, Int

ROUNDS = 8  # trees repeat after two or three


def grow_where_steps_start(
    name: str, trace: Trace, among: Bool[np.ndarray, " n"], num_nodes: int, *, max_depth: int, max_rank: int
) -> Topology:
    """The tree that writes the most tokens per step, of those grown again and again on its own steps.

    Drafts are kept in runs, and no step starts inside a run that a step has kept; so counts over all positions
    favour long chains too much. Here a tree is grown on all of them, then on the positions at which steps start
    when that tree alone decodes the texts, and so on.

    Args:
      name: of the result.
      trace: what to count on.
      among: positions that count; the others are walked over but not counted.
      num_nodes: drafted nodes.
      max_depth: at most so deep.
      max_rank: highest rank used.
    """
    counted, tried = among, dict[tuple[RankPath, ...], tuple[float, Topology]]()
    for _ in range(ROUNDS):
        topology = grow_topology(name, trace.ranks[counted], num_nodes, max_depth=max_depth, max_rank=max_rank)
        if topology.rank_paths in tried:
            break
        kept = accepted_lengths(trace.ranks, topology)
        counted = among & step_starts(kept, trace.bounds)
        tried[topology.rank_paths] = float(kept[counted].mean()) if counted.any() else 0.0, topology
        if not counted.any():
            break
    return max(tried.values(), key=lambda entry: entry[0])[1]


def accepted_per_step(trace: Trace, topology: Topology) -> float:
    """Drafts that one topology alone keeps per step over all texts of a trace; 0 without a step."""
    kept = accepted_lengths(trace.ranks, topology)
    starts = step_starts(kept, trace.bounds)
    return float(kept[starts].mean()) if starts.any() else 0.0


def step_starts(kept: Int[np.ndarray, " n"], bounds: Int[np.ndarray, " bounds"]) -> Bool[np.ndarray, " n"]:
    """Positions at which steps start where one topology decodes every text.

    Example: a text of four positions that would keep 1, 0, 2 and 0 drafts: steps start at 0 and 2, and the second
    one runs over the end.

    Args:
      kept: drafts that a step at each position keeps.
      bounds: of the texts, see ``Trace.bounds``.
    """
    starts = np.zeros(len(kept), bool)
    place, ends = bounds[:-1], bounds[1:]
    while len(place):
        running = place < ends
        place, ends = place[running], ends[running]
        starts[place] = True
        place = place + kept[place] + 1
    return starts


def grow_topology(
    name: str, ranks: Int[np.ndarray, "n K"], num_nodes: int, *, max_depth: int, max_rank: int
) -> Topology:
    """Greedy growth on measured path counts: add the node that most steps would keep, until there are enough.

    A path's count never exceeds its prefix's, and candidates are the next ranks only, so every tree on the
    way is valid (EntMTP, Algorithm 1, with counts of the true path in place of rollouts).

    Args:
      name: of the result.
      ranks: of a trace's positions, or of some of them.
      num_nodes: drafted nodes.
      max_depth: at most so deep.
      max_rank: highest rank used.
    """
    chosen: list[RankPath] = []
    frontier: dict[RankPath, int] = {(0,): _count(ranks, (0,))}
    while len(chosen) < num_nodes and frontier:
        # Equal counts: the smaller sum of ranks, then the shallower path.
        best = min(frontier, key=lambda path: (-frontier[path], sum(path), len(path), path))
        del frontier[best]
        chosen.append(best)
        following = [(*best[:-1], best[-1] + 1)] if best[-1] < max_rank else []
        following += [(*best, 0)] if len(best) < max_depth else []
        frontier |= {path: _count(ranks, path) for path in following}
    return Topology.from_paths(name, chosen)


def _count(ranks: Int[np.ndarray, "n K"], path: RankPath) -> int:
    return int((ranks[:, : len(path)] == np.asarray(path)).all(axis=1).sum())
