"""Level-by-level drafting on hand-worked trees, and what candidates are made of."""

import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.errors import UserError
from entmtp_jax.heads.candidates import NO_TOKEN, Candidates, rank_candidates, scored_rows, scored_vocabulary
from entmtp_jax.heads.hybrid import put_first
from entmtp_jax.heads.levels import draft_levels, follow_path, on_greedy_chain, pick_from_chain, plan_levels
from entmtp_jax.heads.lookup import LookupState, build_lookup, continue_matches, distinct
from entmtp_jax.topology import Topology, chain, k_ary

A, B, C, D, X = 1, 2, 3, 4, 9


def test_levels_of_the_documented_tree():
    tree = Topology.from_paths("tree", [(0,), (1,), (1, 0), (1, 0, 0)])
    columns = ("depth", "parents", "places", "sources", "children", "child_parents", "child_ranks", "visible")
    expected = [
        (0, [0], [], [], [1, 2], [0, 0], [0, 1], []),
        (1, [2], [1], [0], [3], [0], [0], [[1]]),
        (2, [3], [0], [0], [4], [0], [0], [[1, 0], [1, 1]]),
    ]
    found = [tuple(np.asarray(getattr(level, name)).tolist() for name in columns) for level in plan_levels(tree)]
    assert found == expected


def test_levels_of_rows_in_another_order():
    """Rows: 1 is (1,), 2 is (0,), 3 is (0, 0), 4 is (1, 0); both are expanded, the higher rank stands first."""
    tree = Topology("swapped", parents=(-1, 0, 0, 2, 1), ranks=(0, 1, 0, 0, 0))
    root, first = plan_levels(tree)
    assert root.children.tolist() == [2, 1] and root.child_ranks.tolist() == [0, 1]
    assert first.parents.tolist() == [1, 2] and first.places.tolist() == [1, 0]
    assert first.children.tolist() == [4, 3] and first.child_parents.tolist() == [0, 1]
    assert first.visible.tolist() == [[True, False], [False, True]]


def numbered(carry, level, tokens):
    """A head whose rank-r candidate below a path spells the path: path digits, then r."""
    paths = tokens if level.depth == 1 else carry[:, level.sources] * 10 + tokens % 10
    offered = paths[:, :, None] * 10 + jnp.arange(4)
    return Candidates(offered, -offered.astype(jnp.float32)), paths


FIRST = Candidates(jnp.asarray([[[0, 1, 2, 3]]]), jnp.asarray([[[0.0, -1.0, -2.0, -3.0]]]))


@pytest.mark.parametrize(
    "tree",
    [
        k_ary((3, 2, 2)),
        Topology.from_paths("odd", [(0,), (0, 0), (1,), (0, 1), (0, 1, 0)]),
        Topology("swapped", parents=(-1, 0, 0, 2, 1, 4, 4), ranks=(0, 1, 0, 0, 0, 1, 0)),
        chain(5),
    ],
    ids=lambda tree: tree.name,
)
def test_every_node_continues_its_own_parent(tree):
    draft = draft_levels(tree, jnp.asarray([7]), FIRST, None, numbered)
    spelled = [int("".join(map(str, path))) for path in tree.rank_paths]
    assert draft.tokens.tolist() == [[7, *spelled]]
    assert draft.logprobs.tolist() == [[0.0, *(-float(number) for number in spelled)]]


def test_a_path_is_followed_whatever_stands_on_it():
    path = jnp.asarray([[2, 1, 8]])
    found = follow_path(3, FIRST, None, numbered, path)
    assert found.tokens.tolist() == [[[0, 1, 2, 3], [20, 21, 22, 23], [210, 211, 212, 213]]]
    greedy = follow_path(3, FIRST, None, numbered, None)
    assert greedy.tokens[0, :, 0].tolist() == [0, 0, 0] and greedy.tokens[0, 2, 3] == 3


def test_trees_that_the_greedy_chain_fills():
    siblings = Topology.from_paths("siblings", [(0,), (1,), (0, 0), (0, 1), (0, 2), (0, 0, 0)])
    assert on_greedy_chain(chain(6)) and on_greedy_chain(siblings) and on_greedy_chain(k_ary((4,)))
    assert not on_greedy_chain(k_ary((2, 1)))
    greedy = follow_path(4, FIRST, None, numbered, None)  # deeper than the tree
    picked = pick_from_chain(siblings, jnp.asarray([7]), greedy)
    drafted = draft_levels(siblings, jnp.asarray([7]), FIRST, None, numbered)
    assert picked.tokens.tolist() == drafted.tokens.tolist()
    assert picked.logprobs.tolist() == drafted.logprobs.tolist()


def test_candidates_are_ranked_and_named_by_their_ids():
    logits = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    ids = np.asarray([40, 7, 3, 99, 5, 60, 61, 2], np.int32)
    found = rank_candidates(jnp.asarray(logits), 3, jnp.asarray(ids))
    order = np.argsort(-logits, axis=-1)[..., :3]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_array_equal(found.tokens, ids[order])
    np.testing.assert_allclose(found.logprobs, np.take_along_axis(logprobs, order, axis=-1), atol=1e-6)
    np.testing.assert_array_equal(rank_candidates(jnp.asarray(logits), 3, None).tokens, order)


def test_rows_of_the_scored_ids_are_gathered_once():
    output = jnp.arange(12.0).reshape(4, 3)
    params = scored_vocabulary(np.asarray([2, 0]), output)
    assert params["draft_ids"].dtype == jnp.int32
    assert scored_rows(params, output).tolist() == [[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]
    assert scored_vocabulary(None, output) == {} and scored_rows({}, output) is output
    assert list(scored_vocabulary(np.asarray([2, 0]), None)) == ["draft_ids"]


def offer(*tokens):
    """Candidates below one node, the r-th with log-probability -r."""
    return Candidates(jnp.asarray([[tokens]]), -jnp.arange(float(len(tokens)))[None, None])


@pytest.mark.parametrize(
    ("best", "expected", "sources"),
    [
        (D, [D, A, B, C], [None, 0, 2, 3]),
        (X, [X, A, D, B], [None, 0, 1, 2]),
        (A, [A, D, B, C], [None, 1, 2, 3]),
        (C, [C, A, D, B], [None, 0, 1, 2]),
        (NO_TOKEN, [A, D, B, C], [0, 1, 2, 3]),
    ],
)
def test_the_best_candidate_of_one_head_comes_before_the_other_heads(best, expected, sources):
    copied = Candidates(jnp.asarray([[[best, X]]]), jnp.asarray([[[-0.5, -7.0]]]))
    found = put_first(copied, offer(A, D, B, C))
    assert found.tokens.tolist() == [[expected]]
    assert found.logprobs.tolist() == [[[-0.5 if source is None else -float(source) for source in sources]]]


def test_next_tokens_are_told_apart_in_the_order_of_their_occurrences():
    agreeing = jnp.asarray([[[True, False, True, True], [False] * 4, [True] * 4]])
    found = distinct(jnp.asarray([[C, D, C, X]]), agreeing)
    assert found.tokens.tolist() == [[[C, X, NO_TOKEN, NO_TOKEN], [NO_TOKEN] * 4, [C, D, X, NO_TOKEN]]]
    assert found.logprobs[0, 0].tolist() == [0.0, 0.0, -np.inf, -np.inf]


def test_short_suffixes_can_be_left_out():
    """After "d a b" there is one match of two tokens ("a b") and, further back, one of the "b" alone."""
    text = [X, B, C, A, B, D, A, B]
    state = LookupState(jnp.asarray([text]), jnp.asarray([len(text)]))
    for shortest, existing in ((1, [True, True]), (2, [True, False]), (3, [False, False])):
        tokens, found = continue_matches(state, 1, min_suffix=shortest, max_suffix=4, num_matches=2)
        assert found[0].tolist() == existing
    assert tokens[0, 0, 0] != C
    with pytest.raises(UserError, match="1 to 4 tokens"):
        build_lookup(min_suffix=5)
