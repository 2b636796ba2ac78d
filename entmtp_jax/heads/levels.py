"""Drafting level by level: what a head offers below all live nodes of one depth is computed in one batch.

A row of a topology is *live* if it has children, so its own candidates are needed. Which parent a row
continues is read from the topology, never inferred from ranks: a tree may expand any of its nodes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.heads.candidates import Candidates, Draft
from entmtp_jax.topology import ROOT, Topology, chain
from entmtp_jax.types import Array, Bool, Int, RowInts


class Level(NamedTuple):
    """The live rows of one depth and their children; static.

    Example, the tree ``{(0,), (1,), (1, 0), (1, 0, 0)}`` with rows 0 root, 1 ``(0,)``, 2 ``(1,)``, 3 ``(1, 0)``
    and 4 ``(1, 0, 0)``:

        depth  parents  places  sources  children  child_parents  child_ranks  visible
        0      [0]      []      []       [1, 2]    [0, 0]         [0, 1]       []
        1      [2]      [1]     [0]      [3]       [0]            [0]          [[1]]
        2      [3]      [0]     [0]      [4]       [0]            [0]          [[1, 0], [1, 1]]

    Attributes:
      depth: of the parents.
      parents: live rows.
      places: of the parents among the previous level's children; empty for the root.
      sources: of the parents' own parents among the previous level's parents; empty for the root.
      children: rows below the parents.
      child_parents: place of each child's parent among ``parents``.
      child_ranks: rank of each child.
      visible: ``[n, n]`` which of the live nodes of levels 1 to this one, in their order, sees which: its
        ancestors and itself. The root is not among them: it is committed before anything is drafted.
    """

    depth: int
    parents: Int[np.ndarray, " P"]
    places: Int[np.ndarray, " P"]
    sources: Int[np.ndarray, " P"]
    children: Int[np.ndarray, " C"]
    child_parents: Int[np.ndarray, " C"]
    child_ranks: Int[np.ndarray, " C"]
    visible: Bool[np.ndarray, "n n"]


# ``(carry, level, tokens[B, P]) -> (candidates[B, P, R], carry)``: takes in the tokens of a level's parents.
Expand: TypeAlias = Callable[[Any, Level, Array], tuple[Candidates, Any]]


@functools.cache
def plan_levels(topology: Topology) -> tuple[Level, ...]:
    """The levels from the root down to the last one that has children."""
    levels: list[Level] = []
    live: list[int] = []
    above_parents, above_children = [], []
    for depth in range(topology.depth):
        parents = [int(row) for row in np.flatnonzero(topology.depths == depth) if topology.children[row]]
        children = [child for row in parents for child in topology.children[row]]
        drafted = parents if depth else []  # the root continues nothing
        live += drafted
        levels.append(
            Level(
                depth=depth,
                parents=np.asarray(parents, np.int32),
                places=_places(drafted, above_children),
                sources=_places([topology.parents[row] for row in drafted], above_parents),
                children=np.asarray(children, np.int32),
                child_parents=_places([topology.parents[child] for child in children], parents),
                child_ranks=np.asarray([topology.ranks[child] for child in children], np.int32),
                visible=topology.self_mask[np.ix_(live, live)],
            )
        )
        above_parents, above_children = parents, children
    return tuple(levels)


def draft_levels(topology: Topology, root: RowInts, first: Candidates, carry: Any, expand: Expand) -> Draft:
    """Tokens on all nodes of a topology.

    Args:
      topology: of depth 1 or more.
      root: ``[B]`` the decided token.
      first: ``[B, 1, R]`` candidates after the root.
      carry: whatever ``expand`` needs at level 1.
      expand: runs the head on the live parents of a level, whose tokens it gets.
    """
    tokens, logprobs = [root[:, None]], [jnp.zeros((root.shape[0], 1))]
    candidates = first
    for level in plan_levels(topology):
        if level.depth:
            candidates, carry = expand(carry, level, tokens[-1][:, level.places])
        tokens.append(candidates.tokens[:, level.child_parents, level.child_ranks])
        logprobs.append(candidates.logprobs[:, level.child_parents, level.child_ranks])
    rows = np.concatenate([[ROOT], *(level.children for level in plan_levels(topology))])
    order = np.argsort(rows)
    return Draft(jnp.concatenate(tokens, axis=1)[:, order], jnp.concatenate(logprobs, axis=1)[:, order])


def follow_path(
    depth: int, first: Candidates, carry: Any, expand: Expand, tokens: Int[Array, "B depth"] | None
) -> Candidates:
    """``[B, depth, R]`` candidates at every depth of one path.

    Args:
      depth: of the path.
      first: ``[B, 1, R]`` candidates after the root.
      carry: whatever ``expand`` needs at level 1.
      expand: as for ``draft_levels``.
      tokens: of the path's nodes; None follows the first candidates.
    """
    found = [first]
    for level in plan_levels(chain(depth))[1:]:
        taken = found[-1].tokens[:, :, 0] if tokens is None else tokens[:, level.depth - 1, None]
        candidates, carry = expand(carry, level, taken)
        found.append(candidates)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *found)


def on_greedy_chain(topology: Topology) -> bool:
    """Only first candidates are expanded, so the greedy chain's candidates fill the whole tree."""
    return all(not any(topology.rank_path(int(row))) for level in plan_levels(topology) for row in level.parents)


def pick_from_chain(topology: Topology, root: RowInts, greedy: Candidates) -> Draft:
    """Tokens on the nodes of a topology that is ``on_greedy_chain``.

    Args:
      topology: at most as deep as the chain.
      root: ``[B]`` the decided token.
      greedy: ``[B, depth, R]`` candidates at every depth of the greedy chain.
    """
    level, rank = topology.depths[1:] - 1, np.asarray(topology.ranks[1:])
    return Draft(
        tokens=jnp.concatenate([root[:, None], greedy.tokens[:, level, rank]], axis=1),
        logprobs=jnp.pad(greedy.logprobs[:, level, rank], ((0, 0), (1, 0))),
    )


def _places(rows: Sequence[int], among: Sequence[int]) -> Int[np.ndarray, " m"]:
    where = {row: place for place, row in enumerate(among)}
    return np.asarray([where[row] for row in rows], np.int32)
