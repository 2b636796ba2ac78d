"""Topologies against hand-worked tables, Medusa's buffers and a plain walk over the ancestors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from entmtp_jax.errors import UserError
from entmtp_jax.topology import Topology, autoregressive, chain, check_fits, k_ary, medusa_tree_indices

T1 = [(0,), (1,), (0, 0)]
T2 = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


# --- hand-worked tables -------------------------------------------------------------------------------


def test_docstring_example():
    topology = Topology("t1", parents=(-1, 0, 0, 1), ranks=(0, 0, 1, 0))
    assert topology == Topology.from_paths("t1", T1)
    assert (topology.num_rows, topology.num_nodes, topology.depth, topology.max_rank) == (4, 3, 2, 1)
    assert topology.rank_paths == ((0,), (1,), (0, 0))
    assert topology.children == ((1, 2), (3,), (), ())
    assert topology.depths.tolist() == [0, 1, 1, 2]
    assert topology.self_mask.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert topology.row_paths.tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3]]
    assert topology.paths.tolist() == [[0, 1, 3], [0, 2, -1]]
    assert medusa_tree_indices(topology, 10).tolist() == [0, 1, 2, 11]


def test_second_vector_drawn_by_hand():
    #        0            rows        (0,) 1   (1,) 2   (2,) 3
    #      / | \                      (0, 0) 4   (0, 1) 5   (1, 0) 6
    #     1  2  3                     (0, 0, 0) 7
    #    / \  \
    #   4   5  6
    #   |
    #   7
    topology = Topology.from_paths("t2", T2)
    drawn = """
        1.......
        11......
        1.1.....
        1..1....
        11..1...
        11...1..
        1.1...1.
        11..1..1
    """
    assert topology.self_mask.tolist() == [[mark == "1" for mark in line] for line in drawn.split()]
    assert topology.depths.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert topology.paths.tolist() == [[0, 1, 4, 7], [0, 2, 6, -1], [0, 1, 5, -1], [0, 3, -1, -1]]
    assert ((topology.paths >= 0).sum(axis=1) - 1).tolist() == [3, 2, 2, 1]
    assert topology.row_paths[5].tolist() == [0, 1, 5, 5]
    assert medusa_tree_indices(topology, 10).tolist() == [0, 1, 2, 3, 11, 12, 11, 21]
    assert medusa_tree_indices(topology, 3).tolist() == [0, 1, 2, 3, 4, 5, 4, 7]


def test_rows_in_another_order_are_the_same_tree():
    # T1 with row 1 = (1,), row 2 = (0,), row 3 = (0, 0).
    topology = Topology("t1", parents=(-1, 0, 0, 2), ranks=(0, 1, 0, 0))
    assert topology.rank_paths == ((1,), (0,), (0, 0))
    assert topology.self_mask.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert topology.paths.tolist() == [[0, 2, 3], [0, 1, -1]]
    assert topology.children == ((2, 1), (), (3,), ())


def test_plain_decoding_is_the_root_alone():
    topology = autoregressive()
    assert (topology.name, topology.num_rows, topology.num_nodes) == ("ar", 1, 0)
    assert (topology.depth, topology.max_rank, topology.rank_paths) == (0, -1, ())
    assert topology.self_mask.tolist() == [[True]]
    assert topology.paths.tolist() == topology.row_paths.tolist() == [[0]]
    assert medusa_tree_indices(topology, 1).tolist() == [0]
    assert topology == Topology.from_paths("ar", [])


def test_chain():
    topology = chain(3)
    assert topology == Topology.from_paths("chain3", [(0,), (0, 0), (0, 0, 0)])
    assert topology.self_mask.tolist() == np.tri(4, dtype=bool).tolist()
    assert topology.paths.tolist() == [[0, 1, 2, 3]]


def test_k_ary():
    topology = k_ary((3, 2))
    assert (topology.name, topology.num_nodes, topology.depth) == ("kary3x2", 9, 2)
    assert topology.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    assert topology.ranks == (0, 0, 1, 2, 0, 1, 0, 1, 0, 1)
    assert k_ary((1, 1)).parents == chain(2).parents


def test_describe_is_the_docstring_example():
    drawn = str(Topology.describe.__doc__).split("::")[1].strip().splitlines()
    assert k_ary((2, 1)).describe().splitlines() == [line.removeprefix(" " * 12) for line in drawn]


def test_describe_has_a_line_per_row():
    lines = chain(3000).describe().splitlines()  # deeper than Python's recursion limit
    assert len(lines) == 3002
    assert "3000 nodes, 3001 rows, depth 3000, 1 paths, highest rank 0" in lines[0]
    assert autoregressive().describe().splitlines()[1:] == ["root row 0   depth 0"]


# --- random trees against plain Python ----------------------------------------------------------------


@st.composite
def shapes(draw, max_nodes=14):
    """Parents and ranks of a random tree whose rows stand in a random topological order."""
    child_counts: dict[tuple[int, ...], int] = {(): 0}
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.sampled_from(sorted(child_counts)))
        child_counts[(*parent, child_counts[parent])] = 0
        child_counts[parent] += 1
    rows: list[tuple[int, ...]] = [()]
    waiting = sorted(path for path in child_counts if path)
    while waiting:
        path = draw(st.sampled_from([path for path in waiting if path[:-1] in rows]))
        waiting.remove(path)
        rows.append(path)
    return (-1, *(rows.index(path[:-1]) for path in rows[1:])), (0, *(path[-1] for path in rows[1:]))


def root_path(topology, row):
    """Rows from the root to ``row``, by walking up."""
    walk = []
    while row != -1:
        walk.insert(0, row)
        row = topology.parents[row]
    return walk


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_arrays_agree_with_a_walk_over_the_ancestors(shape):
    topology = Topology("random", *shape)
    for row in range(topology.num_rows):
        walk = root_path(topology, row)
        assert topology.depths[row] == len(walk) - 1
        assert np.flatnonzero(topology.self_mask[row]).tolist() == sorted(walk)
        assert topology.row_paths[row].tolist() == walk + [row] * (topology.depth + 1 - len(walk))
        assert topology.rank_path(row) == tuple(topology.ranks[step] for step in walk[1:])
        assert [topology.ranks[child] for child in topology.children[row]] == list(range(len(topology.children[row])))
        assert all(topology.parents[child] == row for child in topology.children[row])
    assert topology.depth == topology.depths.max()
    assert topology.max_rank == max([-1, *topology.ranks[1:]])


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_paths_agree_with_medusas_backward_walk(shape):
    topology = Topology("random", *shape)
    row_of = {(): 0} | {path: row for row, path in enumerate(topology.rank_paths, start=1)}
    covered, expected = set(), []
    for path in sorted(row_of, key=lambda path: (len(path), path), reverse=True):
        if path not in covered:
            expected.append([row_of[path[:length]] for length in range(len(path) + 1)])
        covered |= {path[:length] for length in range(len(path) + 1)}
    padded = [rows + [-1] * (topology.depth + 1 - len(rows)) for rows in expected]
    assert topology.paths.tolist() == padded


@settings(max_examples=60, deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_path_list_round_trips_in_any_order(shape, random):
    topology = Topology("random", *shape)
    shuffled = random.sample(topology.rank_paths, topology.num_nodes)
    rebuilt = Topology.from_paths("random", shuffled)
    assert rebuilt.rank_paths == tuple(sorted(topology.rank_paths, key=lambda path: (len(path), path)))
    assert Topology.from_paths("random", map(list, rebuilt.rank_paths)) == rebuilt


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(5, 20))
def test_medusa_indices_read_the_right_candidate(shape, top_k):
    topology = Topology("random", *shape)
    top_k = max(top_k, topology.max_rank + 1)
    flat = ["root", *((head, rank) for head in range(topology.depth) for rank in range(top_k))]
    read = [flat[index] for index in medusa_tree_indices(topology, top_k)]
    assert read == ["root", *((len(path) - 1, path[-1]) for path in topology.rank_paths)]


def test_equal_topologies_hash_equally():
    first, second = Topology("a", (-1, 0), (0, 0)), Topology("a", (-1, 0), (0, 0))
    assert first.self_mask is first.self_mask  # cached, and not part of the value
    assert first == second and hash(first) == hash(second)
    assert first != Topology("b", (-1, 0), (0, 0))


@pytest.mark.parametrize("field", ["depths", "self_mask", "row_paths", "paths"])
def test_arrays_are_read_only(field):
    with pytest.raises(ValueError, match="read-only"):
        getattr(chain(2), field)[0] = 0


def test_dtypes():
    topology = k_ary((2, 2))
    assert topology.self_mask.dtype == np.bool_
    indices = medusa_tree_indices(topology, 10)
    assert {array.dtype for array in (topology.depths, topology.row_paths, topology.paths, indices)} == {
        np.dtype("int32")
    }


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ((), (), "0 parents and 0 ranks"),
        ((-1, 0), (0,), "2 parents and 1 ranks"),
        ((0, 0), (0, 0), "row 0 is the root, its parent and rank must be (-1, 0), got (0, 0)"),
        ((-1, 0), (1, 0), "got (-1, 1)"),
        ((-1, 0, 2), (0, 0, 0), "row 2 has parent 2; a parent is an earlier row, 0 to 1"),
        ((-1, 2, 0), (0, 0, 0), "row 1 has parent 2"),
        ((-1, -1), (0, 0), "row 1 has parent -1"),
        ((-1, 0, 1, 1), (0, 0, 0, 0), "path (0, 0) (row 3) is there twice; row 2 has the same parent and rank"),
        ((-1, 0, 1), (0, 0, 1), "path (0, 1) (row 2) skips a rank; add (0, 0)"),
        ((-1, 0, 0), (0, 2, 0), "path (2,) (row 1) skips a rank; add (1,)"),
        ((-1, 0), (0, -1), "path (-1,) (row 1) has a negative rank"),
    ],
)
def test_wrong_tuples_are_refused(parents, ranks, message):
    with pytest.raises(UserError) as refusal:
        Topology("bad", parents, ranks)
    assert "topology 'bad'" in str(refusal.value) and message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([()], "path () is the root"),
        ([(0,), (0,)], "path (0,) is listed twice"),
        ([(0,), (1, 0)], "path (1, 0) has no parent; add (1,)"),
        ([(0, 0)], "path (0, 0) has no parent; add (0,)"),
        ([(0,), (2,)], "path (2,) (row 2) skips a rank; add (1,)"),
        ([(-1,)], "path (-1,) (row 1) has a negative rank"),
    ],
)
def test_wrong_path_lists_are_refused(paths, message):
    with pytest.raises(UserError) as refusal:
        Topology.from_paths("bad", paths)
    assert "topology 'bad'" in str(refusal.value) and message in str(refusal.value)


@pytest.mark.parametrize("path", [("0",), (0.0,), 0])
def test_paths_must_hold_integers(path):
    # Where the test run checks annotations too, that check comes first.
    with pytest.raises((UserError, TypeCheckError), match="must be a sequence of integers|Type-check error"):
        Topology.from_paths("bad", [path])


def test_numpy_integers_become_plain_ones():
    assert type(Topology.from_paths("numpy", [tuple(np.zeros(1, np.int64))]).ranks[1]) is int


def test_a_topology_needs_a_name():
    with pytest.raises(UserError, match="needs a name"):
        Topology("", (-1,), (0,))


@pytest.mark.parametrize("call", [lambda: chain(0), lambda: k_ary(()), lambda: k_ary((2, 0))])
def test_constructors_refuse_empty_layers(call):
    with pytest.raises(UserError, match="at least 1"):
        call()


def test_check_fits_accepts_the_exact_limits():
    topology = Topology.from_paths("t2", T2)
    check_fits(topology, num_heads=3, top_k=3, capacity=8)
    check_fits(autoregressive(), num_heads=0, top_k=0, capacity=1)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"num_heads": 2}, "has depth 3: path (0, 0, 0) is beyond the 2 heads"),
        ({"num_heads": 0}, "has depth 3: path (0,) is beyond the 0 heads"),
        ({"top_k": 2}, "has ranks up to 2: path (2,) is beyond the 2 candidates"),
        ({"top_k": 1}, "has ranks up to 2: path (1,) is beyond the 1 candidates"),
        ({"capacity": 7}, "has 8 rows: path (0, 0, 0) is beyond the 7 cache slots"),
        ({"capacity": 4}, "has 8 rows: path (0, 0) is beyond the 4 cache slots"),
        ({"capacity": -1}, "has 8 rows: path () is beyond the -1 cache slots"),
    ],
)
def test_check_fits_names_limit_value_and_path(limits, message):
    with pytest.raises(UserError) as refusal:
        check_fits(Topology.from_paths("t2", T2), **({"num_heads": 3, "top_k": 3, "capacity": 8} | limits))
    assert f"topology 't2' {message}" in str(refusal.value)


def test_medusa_indices_refuse_a_rank_of_the_next_head():
    with pytest.raises(UserError, match=r"path \(2,\) is beyond the 2 candidates"):
        medusa_tree_indices(Topology.from_paths("t2", T2), 2)
