"""Which drafted tokens are kept: the longest path on which every token is what the backbone would write."""

from typing import NamedTuple

import jax.numpy as jnp

from entmtp_jax.topology import Topology
from entmtp_jax.types import Array, Int, RowInts


class Accepted(NamedTuple):
    """The accepted path of every batch row.

    Attributes:
      rows: ``[B, depth + 1]`` tree rows from the root down the path, then the last one repeated.
      length: ``[B]`` accepted length: drafts kept, 0 .. depth.
      tokens: ``[B, depth + 1]`` tokens to emit: the accepted drafts and then the bonus token; entries
        past ``length`` repeat the bonus token and do not count.
    """

    rows: Int[Array, "B E"]
    length: RowInts
    tokens: Int[Array, "B E"]


def accept_matching(candidates: Int[Array, "B N"], chosen: Int[Array, "B N"], topology: Topology) -> Accepted:
    """Keeps the deepest node whose whole path equals the backbone's own choices.

    A node is right when it holds the token that the backbone chose after the node's parent. With greedy
    choices the emitted text is plain greedy decoding's; with choices drawn by noise that is keyed by
    position it is plain sampling's. Among equally deep nodes (only equal tokens on sibling nodes can
    tie) the first row counts.

    Example, with rows 0 = root, 1 and 2 its children, 3 a child of 1:

        candidates  [7, 4, 5, 9]     chosen after each row  [4, 9, 1, 2]
        right       row 1 (4 == chosen[0]), not row 2 (5), row 3 (9 == chosen[1])
        rows        [0, 1, 3]        length 2        tokens [4, 9, 2]

    Args:
      candidates: tokens on the tree, the root in row 0; -1 marks an empty node, never right.
      chosen: the backbone's choice after each row.
      topology: shape of the tree.
    """
    parents = jnp.asarray((0, *topology.parents[1:]))
    right = (candidates == chosen[:, parents]) | (jnp.arange(topology.num_rows) == 0)
    on_path = jnp.asarray(topology.self_mask)
    kept = jnp.all(right[:, None, :] | ~on_path, axis=-1)
    depths = jnp.asarray(topology.depths)
    last = jnp.argmax(jnp.where(kept, depths, -1), axis=-1)
    rows = jnp.asarray(topology.row_paths)[last]
    length = depths[last]
    # chosen[parent of path row e + 1] is that row's own token, so the emitted tokens are the choices along the path.
    return Accepted(rows=rows, length=length, tokens=jnp.take_along_axis(chosen, rows, axis=1))
