"""The lookup head on hand-worked texts, and Medusa heads against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.heads.interface import NO_TOKEN, Features, Shared, last_valid
from entmtp_jax.heads.lookup import LookupState, build_lookup, continue_matches
from entmtp_jax.heads.medusa import MedusaConfig, build_medusa, prepare_medusa
from entmtp_jax.topology import Topology, chain

A, B, C, D, X = 1, 2, 3, 4, 9


def lookup_state(*texts, slots=24):
    rows = np.zeros((len(texts), slots), np.int32)
    for row, text in enumerate(texts):
        rows[row, : len(text)] = text
    return LookupState(jnp.asarray(rows), jnp.asarray([len(text) for text in texts]))


def draft(state, topology):
    head = build_lookup()
    root = jnp.take_along_axis(state.text, (state.length - 1)[:, None], axis=1)[:, 0]
    shared = Shared(jnp.zeros((1, 1)), jnp.zeros((1, 1)))
    proposal = head.propose({}, shared, state, root, topology.depth)
    return head.complete({}, shared, state, root, proposal, topology).tokens.tolist()


def test_the_longest_suffix_comes_first_then_the_latest_occurrence():
    state = lookup_state([A, B, C, A, B, D, A, B])
    tokens, found = continue_matches(state, 3, min_suffix=1, max_suffix=4, num_matches=4)
    assert tokens[0, :2].tolist() == [[D, A, B], [C, A, B]]
    assert found[0].tolist() == [True, True, False, False]


def test_a_longer_suffix_beats_a_later_occurrence():
    # "x a b" occurred once, followed by c; the later "a b" is followed by d.
    state = lookup_state([X, A, B, C, D, A, B, D, X, A, B])
    tokens, _ = continue_matches(state, 1, min_suffix=1, max_suffix=4, num_matches=2)
    assert tokens[0, :, 0].tolist() == [C, D]


def test_a_loop_is_continued_past_the_end_of_the_text():
    state = lookup_state([A, B, C, A, B, C])
    assert draft(state, chain(7)) == [[C, A, B, C, A, B, C, A]]


def test_branches_follow_different_occurrences_and_share_prefixes():
    state = lookup_state([A, B, C, X, A, B, D, X, A, B, C, D, A, B])
    # After "a b": c d (latest), d x, c x. Children of the root: c, d; below c: d, then x.
    tree = Topology.from_paths("tree", [(0,), (1,), (0, 0), (0, 1), (1, 0), (2,)])
    [tokens] = draft(state, tree)
    by_path = dict(zip([(), *tree.rank_paths], tokens, strict=True))
    assert by_path[(0,)] == C and by_path[(1,)] == D and by_path[(2,)] == NO_TOKEN
    assert by_path[(0, 0)] == D and by_path[(0, 1)] == X and by_path[(1, 0)] == X


def test_nothing_is_drafted_where_nothing_repeats():
    assert draft(lookup_state([A, B, C, D]), chain(2)) == [[D, NO_TOKEN, NO_TOKEN]]
    assert draft(lookup_state([A]), chain(2)) == [[A, NO_TOKEN, NO_TOKEN]]


def test_rows_of_a_batch_are_searched_apart():
    state = lookup_state([A, B, A], [C, D, X])
    assert draft(state, chain(2)) == [[A, B, A], [X, NO_TOKEN, NO_TOKEN]]


def test_the_text_grows_by_what_is_committed():
    head = build_lookup()
    state = head.init_state(2, 10)
    features = Features(jnp.zeros((2, 3, 1)), jnp.zeros((2, 3, 1)), ())
    tokens, following = jnp.asarray([[A, B, C], [D, A, B]]), jnp.asarray([[B, C, D], [A, B, X]])
    positions = jnp.asarray([[0, 1, 2], [0, 1, 2]])
    valid = jnp.asarray([[True, True, True], [True, False, False]])
    shared = Shared(jnp.zeros((1, 1)), jnp.zeros((1, 1)))
    state = head.advance({}, shared, state, features, tokens, following, positions, valid)
    assert state.length.tolist() == [4, 2]
    assert state.text[0, :4].tolist() == [A, B, C, D] and state.text[1, :2].tolist() == [D, A]
    idle = jnp.zeros((2, 3), bool)
    again = head.advance({}, shared, state, features, tokens, following, positions + 3, idle)
    assert again.length.tolist() == [4, 2] and (again.text == state.text).all()


def numpy_medusa(kernel, bias, output, hidden, head):
    x = hidden
    for weight, shift in zip(kernel[head], bias[head], strict=True):
        pre = x @ weight.T + shift
        x = x + pre / (1 + np.exp(-pre))
    return x @ output.T


def check_medusa(own_output, draft_vocab):
    rng = np.random.default_rng(0)
    config = MedusaConfig(8, 20, num_heads=3, num_layers=2, draft_vocab_size=draft_vocab, own_output=own_output)
    params = {"kernel": rng.normal(size=(3, 2, 8, 8)), "bias": rng.normal(size=(3, 2, 8))}
    table = rng.normal(size=(20, 8))
    ids = None if draft_vocab is None else rng.permutation(20)[:draft_vocab].astype(np.int32)
    if own_output:
        params["output"] = rng.normal(size=(3, config.num_scored, 8))
    hidden = rng.normal(size=(2, 8))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    shared = Shared(jnp.asarray(table, jnp.float32), jnp.asarray(table, jnp.float32))
    head = build_medusa(config, top_k=4)
    prepared = prepare_medusa(config, params, ids, shared)
    state = head.init_state(2, 1)._replace(normed=jnp.asarray(hidden, jnp.float32))
    tree = Topology.from_paths("tree", [(0,), (1,), (2,), (3,), (1, 0), (1, 1), (1, 1, 0), (0, 0)])
    root = jnp.asarray([5, 6])
    drafted = head.complete(prepared, shared, state, root, head.propose(prepared, shared, state, root, 3), tree)
    for row in range(2):
        assert drafted.tokens[row, 0] == root[row]
        for node, path in enumerate(tree.rank_paths, start=1):
            level = len(path) - 1
            output = np.asarray(params["output"][level]) if own_output else table if ids is None else table[ids]
            logits = numpy_medusa(np.asarray(params["kernel"]), np.asarray(params["bias"]), output, hidden[row], level)
            column = np.argsort(-logits, kind="stable")[path[-1]]
            assert drafted.tokens[row, node] == (column if ids is None else ids[column])
            logprob = logits[column] - np.log(np.exp(logits).sum())
            np.testing.assert_allclose(drafted.logprobs[row, node], logprob, atol=1e-4)


def test_medusa_equals_numpy():
    for own_output in (False, True):
        for draft_vocab in (None, 11):
            check_medusa(own_output, draft_vocab)


def test_last_valid_keeps_the_old_value_of_idle_rows():
    values = jnp.arange(12.0).reshape(2, 3, 2)
    valid = jnp.asarray([[True, True, False], [False, False, False]])
    kept = last_valid(values, valid, jnp.full((2, 2), -1.0))
    assert kept.tolist() == [[2.0, 3.0], [-1.0, -1.0]]
