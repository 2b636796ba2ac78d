"""Trees grown on a trace: which nodes most steps would keep."""

import numpy as np

from entmtp_jax.topology import RankPath, Topology
from entmtp_jax.types import Int


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
