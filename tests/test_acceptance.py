"""Greedy acceptance against a plain-Python walk down the tree."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.acceptance import accept_matching
from entmtp_jax.topology import Topology


def walk(candidates, chosen, topology):
    """Follows the first child that holds the chosen token, as deep as it goes; returns the rows."""
    best = [0]

    def visit(row, path):
        nonlocal best
        if len(path) > len(best):
            best = path
        for child, parent in enumerate(topology.parents):
            if parent == row and child and candidates[child] == chosen[row]:
                visit(child, [*path, child])

    visit(0, [0])
    return best


def test_the_docstring_example():
    topology = Topology("t1", parents=(-1, 0, 0, 1), ranks=(0, 0, 1, 0))
    accepted = accept_matching(jnp.asarray([[7, 4, 5, 9]]), jnp.asarray([[4, 9, 1, 2]]), topology)
    assert accepted.rows.tolist() == [[0, 1, 3]]
    assert accepted.length.tolist() == [2]
    assert accepted.tokens.tolist() == [[4, 9, 2]]


def test_empty_nodes_and_wrong_parents_are_never_accepted():
    topology = Topology("chain", parents=(-1, 0, 1), ranks=(0, 0, 0))
    # The second node is right, but it stands below a wrong one.
    accepted = accept_matching(jnp.asarray([[7, -1, 9]]), jnp.asarray([[4, 9, 1]]), topology)
    assert accepted.length.tolist() == [0] and accepted.tokens[0, 0] == 4


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 10_000))
def test_equals_a_walk_on_random_trees(attach, seed):
    parents, ranks, children = [-1], [0], [0]
    for place in attach:
        parent = place % len(parents)
        parents.append(parent)
        ranks.append(children[parent])
        children[parent] += 1
        children.append(0)
    topology = Topology("random", tuple(parents), tuple(ranks))
    rng = np.random.default_rng(seed)
    candidates = rng.integers(0, 3, (2, len(parents)))
    # Siblings differ, as a head's candidates do.
    candidates[:, 1:] = (candidates[:, :1] + np.asarray(ranks[1:]) + rng.integers(0, 2, (2, 1))) % 7
    chosen = rng.integers(0, 4, (2, len(parents)))
    accepted = accept_matching(jnp.asarray(candidates), jnp.asarray(chosen), topology)
    for row in range(2):
        path = walk(candidates[row].tolist(), chosen[row].tolist(), topology)
        length = int(accepted.length[row])
        assert length == len(path) - 1
        assert accepted.rows[row, : length + 1].tolist() == path
        assert accepted.tokens[row, : length + 1].tolist() == [int(chosen[row, node]) for node in path]
