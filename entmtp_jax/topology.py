"""Topologies: the static shapes of draft trees, and everything that follows from a shape.

A topology is two tuples, ``parents`` and ``ranks``, over rows: row 0 is the root (the token that is
already decided) and every further row is a drafted node. Masks, depths and paths are derived here, on
the host and in NumPy; inside a compiled step they are constants. A *path* is written as Medusa writes it:
the ranks met on the way from the root, so ``(0, 1)`` is the second candidate below the first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.types import Bool, Int

ROOT = 0
NO_PARENT = -1
NO_ROW = -1

RankPath = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Topology:
    """A tree of draft positions: which row continues which, and with which of the parent's candidates.

    Rows may stand in any order in which a parent comes before its children.

    Example, the tree ``{(0,), (1,), (0, 0)}``::

        Topology("t1", parents=(-1, 0, 0, 1), ranks=(0, 0, 1, 0))

        row 0  root         depths     0 1 1 2
        row 1  path (0,)    self_mask  1000 / 1100 / 1010 / 1101
        row 2  path (1,)    row_paths  [0,0,0] [0,1,1] [0,2,2] [0,1,3]
        row 3  path (0, 0)  paths      [0,1,3] [0,2,-1]

    Attributes:
      name: what a bank and the command line call it.
      parents: for each of the N rows its parent's row; ``NO_PARENT`` for the root alone.
      ranks: for each row its place among its parent's candidates, 0 the most probable; 0 for the root.

    Raises:
      UserError: the two tuples are not one tree with contiguous ranks; the message names the node.
    """

    name: str
    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise UserError("a topology needs a name, got an empty one")
        _check_parents(self)
        _check_ranks(self)

    @classmethod
    def from_paths(cls, name: str, paths: Iterable[Sequence[SupportsIndex]]) -> Topology:
        """Builds a topology from a Medusa-style path list; rows are sorted by path length, then lexicographically.

        Args:
          paths: one sequence of ranks per node, in any order; the root is not listed, no path at all is depth 0.

        Raises:
          UserError: a path is empty, negative, listed twice, or its parent or a lower rank is missing.
        """
        where = f"topology {name!r}: path"
        ordered = sorted((_integers(path, where) for path in paths), key=lambda path: (len(path), path))
        row_of: dict[RankPath, int] = {(): ROOT}
        for row, path in enumerate(ordered, start=1):
            if not path:
                raise UserError(f"{where} () is the root, which every topology has; leave it out")
            if path in row_of:
                raise UserError(f"{where} {path} is listed twice; list it once")
            if path[:-1] not in row_of:
                raise UserError(f"{where} {path} has no parent; add {path[:-1]} or leave it out")
            row_of[path] = row
        parents = (NO_PARENT, *(row_of[path[:-1]] for path in ordered))
        return cls(name, parents, (0, *(path[-1] for path in ordered)))

    @property
    def num_rows(self) -> int:
        """Rows of one verification, N: the root and every node."""
        return len(self.parents)

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, N - 1."""
        return len(self.parents) - 1

    @functools.cached_property
    def depth(self) -> int:
        """Tokens drafted along the longest path; 0 is plain decoding."""
        return int(self.depths.max())

    @functools.cached_property
    def max_rank(self) -> int:
        """Highest rank that any node uses; -1 without nodes."""
        return max(self.ranks[1:], default=-1)

    @functools.cached_property
    def depths(self) -> Int[np.ndarray, " N"]:
        """int32 distance of every row from the root; a row's position is the root's plus this."""
        depths = np.zeros(self.num_rows, np.int32)
        for row, parent in enumerate(self.parents[1:], start=1):
            depths[row] = depths[parent] + 1
        return _read_only(depths)

    @functools.cached_property
    def self_mask(self) -> Bool[np.ndarray, "N N"]:
        """``self_mask[i, j]``: row i may attend to row j, because j is i or one of its ancestors."""
        mask = np.eye(self.num_rows, dtype=np.bool_)
        for row, parent in enumerate(self.parents[1:], start=1):
            mask[row] |= mask[parent]
        return _read_only(mask)

    @functools.cached_property
    def row_paths(self) -> Int[np.ndarray, "N levels"]:
        """int32 rows from the root to each row, then that row repeated up to depth + 1 entries.

        The first ``depths[i] + 1`` entries of line i count; the padding keeps every entry a valid index.
        """
        row_paths = np.zeros((self.num_rows, self.depth + 1), np.int32)
        for row, parent in enumerate(self.parents[1:], start=1):
            row_paths[row] = row_paths[parent]
            row_paths[row, self.depths[row] :] = row
        return _read_only(row_paths)

    @functools.cached_property
    def paths(self) -> Int[np.ndarray, "P levels"]:
        """int32 rows of every root-to-leaf path, padded with ``NO_ROW`` up to depth + 1 entries.

        The longest paths come first and, at equal length, the lexicographically last: Medusa's
        ``retrieve_indices``, whose order decides ties.
        """
        inner = set(self.parents)
        leaves = [row for row in range(self.num_rows) if row not in inner]
        leaves.sort(key=lambda row: (self.depths[row], self.rank_path(row)), reverse=True)
        beyond_leaf = np.arange(self.depth + 1) > self.depths[leaves][:, None]
        return _read_only(np.where(beyond_leaf, np.int32(NO_ROW), self.row_paths[leaves]))

    @functools.cached_property
    def rank_paths(self) -> tuple[RankPath, ...]:
        """Path of ranks of every node, row 1 first; ``from_paths`` inverts it."""
        found: list[RankPath] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            found.append((*found[parent], rank))
        return tuple(found[1:])

    def rank_path(self, row: int) -> RankPath:
        """Path of ranks of one row; empty for the root."""
        return self.rank_paths[row - 1] if row else ()

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Rows below each row, in the order of their ranks."""
        below: list[list[int]] = [[] for _ in self.parents]
        for row in sorted(range(1, self.num_rows), key=lambda row: self.ranks[row]):
            below[self.parents[row]].append(row)
        return tuple(map(tuple, below))

    def describe(self) -> str:
        """A readable tree: one line per row with its rank, row number and depth.

        Example, ``k_ary((2, 1)).describe()``::

            kary2x1: 4 nodes, 5 rows, depth 2, 2 paths, highest rank 1
            root           row 0   depth 0
            |-- rank 0     row 1   depth 1
            |   `-- rank 0 row 3   depth 2
            `-- rank 1     row 2   depth 1
                `-- rank 0 row 4   depth 2
        """
        drawn = []
        pending = [("root", "", ROOT)]  # a stack, so that a long chain is not a deep recursion
        while pending:
            text, indent, row = pending.pop()
            drawn.append((text, row))
            below = self.children[row]
            for child in reversed(below):
                branch, gap = ("`-- ", "    ") if child == below[-1] else ("|-- ", "|   ")
                pending.append((f"{indent}{branch}rank {self.ranks[child]}", indent + gap, child))
        width = max(len(text) for text, _ in drawn)
        lines = [f"{text:{width}} row {row:<3} depth {self.depths[row]}" for text, row in drawn]
        size = f"{self.num_nodes} nodes, {self.num_rows} rows, depth {self.depth}, {len(self.paths)} paths"
        return "\n".join([f"{self.name}: {size}, highest rank {self.max_rank}", *lines])


def autoregressive() -> Topology:
    """Plain decoding as a topology: the root alone, nothing drafted."""
    return Topology("ar", (NO_PARENT,), (0,))


def chain(length: int) -> Topology:
    """The most probable candidate of each of ``length`` levels, one below the other."""
    if length < 1:
        raise UserError(f"a chain needs a length of at least 1, got {length}; depth 0 is the topology 'ar'")
    return Topology(f"chain{length}", tuple(range(NO_PARENT, length)), (0,) * (length + 1))


def k_ary(widths: Sequence[int]) -> Topology:
    """Full layers: every row of level i has ``widths[i]`` children.

    Example: ``k_ary((3, 2))`` is ``kary3x2``: 3 children of the root with 2 children each, 9 nodes.
    """
    if not widths or min(widths) < 1:
        raise UserError(f"a k-ary topology needs layer widths of at least 1, got {tuple(widths)}")
    layers = (itertools.product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1))
    return Topology.from_paths("kary" + "x".join(map(str, widths)), itertools.chain(*layers))


def medusa_tree_indices(topology: Topology, top_k: int) -> Int[np.ndarray, " N"]:
    """Where each row's token stands in Medusa's flat list of candidates (``tree_indices``, int32).

    The list is [root token, head 0's top_k tokens, head 1's top_k tokens, ...], so a row of depth d and
    rank r reads ``1 + top_k * (d - 1) + r`` and the root reads 0; Medusa's release keeps 10 per head.
    A rank of ``top_k`` or more would read the next head's tokens and is a ``UserError``.

    Example: for rows ``(), (0,), (1,), (0, 0)`` and ``top_k=10`` the indices are ``[0, 1, 2, 11]``.
    """
    _check_rank_limit(topology, top_k)
    indices = 1 + top_k * (topology.depths - 1) + np.asarray(topology.ranks, np.int32)
    return np.where(topology.depths == 0, 0, indices).astype(np.int32)


def check_fits(topology: Topology, *, num_heads: int, top_k: int, capacity: int) -> None:
    """Refuses a topology that the heads cannot fill or the cache cannot hold.

    Args:
      num_heads: levels that the heads can draft.
      top_k: candidates that the heads keep per level.
      capacity: slots of the cache.

    Raises:
      UserError: deeper than ``num_heads``, a rank of ``top_k`` or more, or more than ``capacity`` rows.
    """
    name = f"topology {topology.name!r}"
    if topology.depth > num_heads:
        path = topology.rank_path(int(np.argmax(topology.depths > num_heads)))
        fix = "choose a shallower topology or heads with more levels"
        raise UserError(f"{name} has depth {topology.depth}: path {path} is beyond the {num_heads} heads; {fix}")
    _check_rank_limit(topology, top_k)
    if topology.num_rows > capacity:
        path = topology.rank_path(max(capacity, 0))
        fix = "choose a narrower topology or a larger cache"
        raise UserError(f"{name} has {topology.num_rows} rows: path {path} is beyond the {capacity} cache slots; {fix}")


def _check_rank_limit(topology: Topology, top_k: int) -> None:
    if topology.max_rank >= top_k:
        path = topology.rank_path(next(row for row, rank in enumerate(topology.ranks) if rank >= top_k))
        fix = "raise the draft top-k or choose a narrower topology"
        what = f"path {path} is beyond the {top_k} candidates (top-k) that are drafted per level"
        raise UserError(f"topology {topology.name!r} has ranks up to {topology.max_rank}: {what}; {fix}")


def _check_parents(topology: Topology) -> None:
    where, parents, ranks = f"topology {topology.name!r}", topology.parents, topology.ranks
    if not parents or len(parents) != len(ranks):
        raise UserError(f"{where}: {len(parents)} parents and {len(ranks)} ranks; give one of each per row")
    root = (parents[ROOT], ranks[ROOT])
    if root != (NO_PARENT, 0):
        raise UserError(f"{where}: row 0 is the root, its parent and rank must be {(NO_PARENT, 0)}, got {root}")
    for row, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < row:
            raise UserError(f"{where}: row {row} has parent {parent}; a parent is an earlier row, 0 to {row - 1}")


def _check_ranks(topology: Topology) -> None:
    # Ranks must be contiguous: a gap would draft a candidate while skipping a more probable one.
    for below in topology.children:
        for expected, child in enumerate(below):
            path = topology.rank_path(child)
            what = f"topology {topology.name!r}: path {path} (row {child})"
            if path[-1] < 0:
                raise UserError(f"{what} has a negative rank; ranks count from 0")
            if path[-1] < expected:
                raise UserError(f"{what} is there twice; row {below[expected - 1]} has the same parent and rank")
            if path[-1] > expected:
                raise UserError(f"{what} skips a rank; add {(*path[:-1], expected)} or lower the rank")


def _integers(path: Iterable[SupportsIndex], where: str) -> RankPath:
    try:
        return tuple(map(operator.index, path))
    except TypeError:
        raise UserError(f"{where} {path!r} must be a sequence of integers") from None


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
