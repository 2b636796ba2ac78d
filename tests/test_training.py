"""Losses, measures, draft vocabulary, batches and optimiser, each against plain NumPy or a table by hand."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.backbone.precision import linear_bfloat16, linear_highest
from entmtp_jax.errors import UserError
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.training.accuracy import NOT_RANKED, accuracies
from entmtp_jax.training.data import from_sequences
from entmtp_jax.training.draft_vocab import (
    MISS,
    NO_COLUMN,
    rank_ids,
    response_tokens,
    smallest_size,
    sweep_coverage,
    to_columns,
)
from entmtp_jax.training.examples import Examples
from entmtp_jax.training.head_run import Constants, build_gradient, build_update, stored_precision
from entmtp_jax.training.loop import batch_indices
from entmtp_jax.training.losses import (
    NUM_FREQUENT,
    DraftLoss,
    cross_entropy,
    depth_weights,
    divergence,
    weighted_logits,
    weighted_sum,
)
from entmtp_jax.training.medusa import Batch, build_loss, build_target_ranks, init_params, medusa_problem
from entmtp_jax.training.optimizer import build_optimizer, init_state, learning_rates


def silu(x):
    return x / (1 + np.exp(-x))


def numpy_logits(params, hidden, rows):
    """Heads written out plainly: ``[n, K, X]``."""
    heads = []
    for kernels, biases in zip(params["kernel"], params["bias"], strict=True):
        x = hidden
        for kernel, bias in zip(kernels, biases, strict=True):
            x = x + silu(x @ kernel.T + bias)
        heads.append(x @ rows.T)
    return np.stack(heads, axis=1)


def numpy_loss(logits, columns):
    total = 0.0
    for k in range(logits.shape[1]):
        terms = []
        for row, column in zip(logits[:, k], columns[:, k], strict=True):
            if column >= 0:
                terms.append(math.log(np.exp(row - row.max()).sum()) + row.max() - row[column])
        total += 0.8**k * (sum(terms) / len(terms) if terms else 0.0)
    return total


def random_problem(scored, *, hidden_size=8, heads=3, layers=2, count=20, seed=0):
    rng = np.random.default_rng(seed)
    shape = MedusaConfig(hidden_size, scored, num_heads=heads, num_layers=layers)
    params = {
        "kernel": rng.normal(size=(heads, layers, hidden_size, hidden_size)).astype(np.float32) / 3,
        "bias": rng.normal(size=(heads, layers, hidden_size)).astype(np.float32) / 3,
    }
    hidden = rng.normal(size=(count, hidden_size)).astype(np.float32)
    rows = rng.normal(size=(scored, hidden_size)).astype(np.float32)
    columns = rng.integers(-2, scored, size=(count, heads)).astype(np.int32)
    return shape, params, hidden, rows, columns


KIND = DraftLoss(depth_weights(0.8, 3))


def constants(rows):
    return Constants(jnp.asarray(rows), jnp.zeros((1, rows.shape[1])))


def plain_batch(hidden, columns):
    return Batch(jnp.asarray(hidden), jnp.asarray(columns), None)


def test_loss_of_the_worked_example():
    losses = [jnp.asarray([1.0, 3.0]), jnp.asarray([2.0, 9.0])]
    valid = [jnp.asarray([True, True]), jnp.asarray([True, False])]
    loss, per_depth = weighted_sum(losses, valid, (1, 0.8))
    np.testing.assert_allclose(per_depth, [2, 2])
    assert float(loss) == pytest.approx(3.6)


def test_depth_weights_are_those_of_the_papers():
    assert depth_weights(0.8, 3) == pytest.approx((1, 0.8, 0.64))
    fast = np.asarray(depth_weights(0.6, 3))
    np.testing.assert_allclose(fast / fast.sum(), [0.51, 0.31, 0.18], atol=0.005)


def test_loss_equals_the_formula_written_plainly():
    shape, params, hidden, rows, columns = random_problem(13)
    on_device = jax.tree.map(jnp.asarray, params)
    loss, _ = build_loss(shape, KIND)(on_device, plain_batch(hidden, columns), constants(rows), None)
    assert float(loss) == pytest.approx(numpy_loss(numpy_logits(params, hidden, rows), columns), rel=1e-5)


def test_misses_and_missing_targets_have_no_gradient():
    shape, params, hidden, rows, columns = random_problem(13)
    columns[:, 1], columns[:, 2] = MISS, NO_COLUMN
    columns[::2, 0] = NO_COLUMN
    on_device = jax.tree.map(jnp.asarray, params)

    def loss(hidden):
        return build_loss(shape, KIND)(on_device, Batch(hidden, jnp.asarray(columns), None), constants(rows), None)[0]

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(hidden)))
    assert (gradient[::2] == 0).all()
    assert (np.abs(gradient[1::2][columns[1::2, 0] >= 0]).max(axis=1) > 0).all()


@pytest.fixture
def one_frequent(monkeypatch):
    monkeypatch.setattr("entmtp_jax.training.losses.NUM_FREQUENT", 1)


@pytest.mark.usefixtures("one_frequent")
@pytest.mark.parametrize(("column", "total"), [(0, 4.0), (2, 2.0), (3, 5.0)])
def test_sampled_softmax_of_the_worked_example(column, total):
    logits, target = weighted_logits(jnp.zeros((1, 2)), jnp.ones((4, 2)), jnp.asarray([column]), jnp.asarray([2]))
    assert float(jnp.exp(logits).sum()) == pytest.approx(total, rel=1e-6)
    assert float(cross_entropy(logits, target)[0]) == pytest.approx(math.log(total), rel=1e-6)


@pytest.mark.parametrize("column", range(6))
def test_sampled_partition_function_is_unbiased(column, monkeypatch):
    """Mean over every possible sample of 2 of the 4 rare columns, for a frequent and for a rare target."""
    monkeypatch.setattr("entmtp_jax.training.losses.NUM_FREQUENT", 2)
    rng = np.random.default_rng(1)
    state, rows = rng.normal(size=(1, 5)).astype(np.float32), rng.normal(size=(6, 5)).astype(np.float32)
    exact = (state @ rows.T)[0]
    totals = []
    for sample in itertools.combinations(range(2, 6), 2):
        arguments = (jnp.asarray(state), jnp.asarray(rows), jnp.asarray([column]), jnp.asarray(sample))
        logits, target = weighted_logits(*arguments)
        assert float(logits[0, target[0]]) == pytest.approx(float(exact[column]), rel=1e-5)
        totals.append(float(jnp.exp(logits).sum()))
    assert np.mean(totals) == pytest.approx(np.exp(exact).sum(), rel=1e-5)


@pytest.mark.parametrize("teacher", [0.0, 0.7])
def test_sampling_all_rare_columns_is_the_full_softmax(teacher):
    shape, params, hidden, rows, columns = random_problem(NUM_FREQUENT + 30, count=40)
    columns[:20] = np.random.default_rng(2).integers(NUM_FREQUENT, NUM_FREQUENT + 30, size=(20, 3))
    states = np.random.default_rng(3).normal(size=(40, 3, 8)).astype(np.float32)
    batch = Batch(jnp.asarray(hidden), jnp.asarray(columns), jnp.asarray(states))
    everything = jnp.arange(NUM_FREQUENT, NUM_FREQUENT + 30)
    loss = build_loss(shape, KIND._replace(teacher=teacher))
    gradient_of = jax.value_and_grad(lambda p, sampled: loss(p, batch, constants(rows), sampled)[0])
    full, full_gradient = gradient_of(params, None)
    sampled, sampled_gradient = gradient_of(params, everything)
    assert float(sampled) == pytest.approx(float(full), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), full_gradient, sampled_gradient)


def test_divergence_equals_the_formula_written_plainly():
    rng = np.random.default_rng(5)
    ours, theirs = rng.normal(size=(2, 4, 9))
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (theirs, ours))
    expected = (p * np.log(p / q)).sum(axis=1)
    np.testing.assert_allclose(divergence(jnp.asarray(ours), jnp.asarray(theirs)), expected, rtol=1e-4)
    without = jnp.asarray(np.pad(ours, ((0, 0), (0, 1)), constant_values=-np.inf))
    teacher = jnp.asarray(np.pad(theirs, ((0, 0), (0, 1)), constant_values=-np.inf))
    value, gradient = jax.value_and_grad(lambda x: divergence(x, teacher).sum())(without)
    assert float(value) == pytest.approx(expected.sum(), rel=1e-4) and np.isfinite(gradient).all()
    assert np.abs(divergence(teacher, teacher)).max() < 1e-6


def measure(shape, params, hidden, columns, rows):
    """Accuracies of all the examples."""
    everything = np.arange(len(columns))
    examples = Examples(hidden, everything, columns, train=everything[:0], held_out=everything)
    problem = medusa_problem(shape, examples, constants(rows), KIND, seed=0, part=4)
    return problem.measure(params, True)


def test_cross_entropy_picks_the_target():
    logits = jnp.log(jnp.asarray([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]))
    np.testing.assert_allclose(cross_entropy(logits, jnp.asarray([2, 0])), [-math.log(0.7), math.log(2)], rtol=1e-5)


def test_accumulated_passes_are_one_large_pass():
    """Two passes over the halves of a batch make the update that one pass over the whole makes."""
    shape, params, hidden, rows, columns = random_problem(13)
    columns = np.maximum(columns, 0)
    examples = Examples(hidden, np.arange(20), columns, train=np.arange(20), held_out=np.arange(20))
    problem = medusa_problem(shape, examples, constants(rows), KIND, seed=0, part=4)
    gradient = build_gradient(problem)
    update = build_update(build_optimizer(0.1, 4, 0.0))
    random, on_device = np.random.default_rng(0), jax.tree.map(jnp.asarray, params)

    def after(*parts):
        state = init_state(jax.tree.map(jnp.copy, on_device), build_optimizer(0.1, 4, 0.0))
        for _ in range(2):  # the first update has learning rate 0
            given = [gradient(state.params, problem.batch(part, random), constants(rows), None) for part in parts]
            state, _ = update(state, given)
        return state.params

    whole, halves = after(np.arange(20)), after(np.arange(10), np.arange(10, 20))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), whole, halves)
    assert np.abs(np.asarray(whole["kernel"]) - params["kernel"]).max() > 0.01


def test_a_bfloat16_pass_gives_float32_gradients_close_to_the_exact_ones():
    shape, params, hidden, rows, columns = random_problem(13)
    examples = Examples(hidden, np.arange(20), columns, train=np.arange(20), held_out=np.arange(20))
    results = []
    for linear in (linear_highest, linear_bfloat16):
        kind = KIND._replace(linear=linear)
        problem = medusa_problem(shape, examples, constants(rows), kind, seed=0, part=4)
        gradient = build_gradient(problem)
        batch = problem.batch(np.arange(20), np.random.default_rng(0))
        results.append(gradient(jax.tree.map(jnp.asarray, params), batch, constants(rows), None)[1])
    exact, rounded = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(r)]) for r in results)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(results[1]))
    assert 0 < np.linalg.norm(exact - rounded) < 0.03 * np.linalg.norm(exact)


def test_matrices_are_stored_in_bfloat16_and_small_vectors_are_not():
    params = {"layer": {"down": jnp.ones((2, 2)), "norm": {"scale": jnp.ones(2)}}, "bias": jnp.ones((3, 2))}
    stored = stored_precision(params)
    assert stored["layer"]["down"].dtype == jnp.bfloat16
    assert stored["layer"]["norm"]["scale"].dtype == stored["bias"].dtype == jnp.float32


@pytest.mark.parametrize("own_output", [False, True])
def test_fresh_heads_repeat_the_backbones_guess(own_output):
    shape = MedusaConfig(8, 13, num_heads=2, own_output=own_output)
    rng = np.random.default_rng(0)
    hidden, rows = rng.normal(size=(5, 8)).astype(np.float32), rng.normal(size=(13, 8)).astype(np.float32)
    params = init_params(shape, jnp.asarray(rows), 0)
    best = np.argmax(hidden @ rows.T, axis=1).astype(np.int32)
    columns = np.stack([best, best], axis=1)
    result = measure(shape, params, hidden, columns, rows)
    assert result.top1 == [1.0, 1.0] and result.greedy_chain == 2.0


def test_target_ranks_equal_a_stable_sort():
    shape, params, hidden, rows, columns = random_problem(13, count=50)
    rows[5] = rows[4]  # a tie in every score
    columns[:5], columns[5:10] = 4, 5
    ranks = build_target_ranks(shape)(params, plain_batch(hidden, columns), constants(rows))
    order = np.argsort(-numpy_logits(params, hidden, rows).astype(np.float64), axis=2, kind="stable")
    for (n, k), column in np.ndenumerate(columns):
        if column in (4, 5):
            other = np.flatnonzero(np.isin(order[n, k], (4, 5)))
            assert ranks[n, k] == other[column - 4]
        else:
            assert ranks[n, k] == (NOT_RANKED if column < 0 else np.flatnonzero(order[n, k] == column)[0])


def test_accuracies_of_the_worked_example():
    result = accuracies(np.asarray([[0, 0], [0, 3]]), np.ones((2, 2), bool))
    assert result == ([1.0, 0.5], [1.0, 1.0], [1.0, 1.0], 1.5)


def test_misses_count_as_wrong_and_ends_do_not_count():
    ranks = np.asarray([[0, 99], [99, 0], [0, 99]])
    exists = np.asarray([[True, True], [True, True], [True, False]])
    result = accuracies(ranks, exists)
    assert result.top10 == pytest.approx([2 / 3, 1 / 2])
    assert result.greedy_chain == pytest.approx((1 + 0 + 1) / 3)


def test_evaluation_does_not_depend_on_its_chunks(monkeypatch):
    shape, params, hidden, rows, columns = random_problem(13, count=50)
    whole = measure(shape, params, hidden, columns, rows)
    monkeypatch.setattr("entmtp_jax.training.medusa.POSITIONS_PER_PASS", 7)
    assert measure(shape, params, hidden, columns, rows) == whole
    ranks = np.argsort(np.argsort(-numpy_logits(params, hidden, rows), axis=2), axis=2)
    picked = np.take_along_axis(ranks, np.maximum(columns, 0)[:, :, None], axis=2)[:, :, 0]
    right = (picked < 5) & (columns >= 0)
    assert whole.top5 == pytest.approx((right.sum(axis=0) / (columns != NO_COLUMN).sum(axis=0)).tolist())


def test_only_responses_are_counted():
    records = from_sequences([[1, 2, 3, 4], [5, 6], [7, 8, 9]], [2, 2, 0])
    assert response_tokens(records).tolist() == [3, 4, 7, 8, 9]


def test_ids_are_ranked_by_frequency_with_eos_first():
    tokens = np.asarray([4, 4, 4, 1, 1, 3, 0], np.int32)
    assert rank_ids(tokens, vocab_size=6, always=[5]).tolist() == [5, 4, 1, 0, 3, 2]
    assert rank_ids(tokens, vocab_size=6, always=[3, 2]).tolist() == [2, 3, 4, 1, 0, 5]


def test_size_of_the_worked_example():
    ranked = np.asarray([7, 3, 5, 0, 1, 2, 4, 6, 8], np.int32)
    text = np.asarray([7, 7, 3, 5])
    assert [smallest_size(ranked, 3, text, share) for share in (0.5, 0.51, 0.75, 0.76, 1.0)] == [1, 2, 2, 3, 3]


@settings(max_examples=50, deadline=None)
@given(
    counted=st.lists(st.integers(0, 19), min_size=1, max_size=60),
    examined=st.lists(st.integers(0, 19), min_size=1, max_size=60),
    coverage=st.floats(0.01, 1.0),
)
def test_size_is_the_smallest_that_covers(counted, examined, coverage):
    counted, examined = np.asarray(counted, np.int32), np.asarray(examined, np.int32)
    ranked = rank_ids(counted, vocab_size=20, always=())
    num_seen = len(np.unique(counted))
    size = smallest_size(ranked, num_seen, examined, coverage)

    def share(n):
        return np.isin(examined, ranked[:n]).mean()

    assert share(size) >= coverage or size == num_seen
    assert size == 1 or share(size - 1) < coverage
    assert all(found == pytest.approx(share(n)) for n, found in sweep_coverage(ranked, num_seen, examined))


@pytest.mark.parametrize("coverage", [0.0, -1.0, 1.01])
def test_coverage_must_be_a_share(coverage):
    with pytest.raises(UserError, match="draft coverage must lie in"):
        smallest_size(np.arange(5), 5, np.arange(3), coverage)


def test_targets_become_columns():
    columns = to_columns(np.asarray([[3, 7], [4, -1]], np.int32), np.asarray([7, 3], np.int32))
    assert columns.tolist() == [[1, 0], [MISS, NO_COLUMN]]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 40), batch=st.integers(1, 10), seed=st.integers(0, 3))
def test_an_epoch_sees_every_position_at_most_once(count, batch, seed):
    if count < batch:
        with pytest.raises(UserError, match=f"only {count} training positions"):
            batch_indices(0, count=count, batch=batch, seed=seed)
        return
    per_epoch = count // batch
    for epoch in range(2):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        drawn = [batch_indices(step, count=count, batch=batch, seed=seed).tolist() for step in steps]
        together = [index for indices in drawn for index in indices]
        assert len(set(together)) == len(together) == per_epoch * batch and set(together) <= set(range(count))


def test_epochs_and_seeds_differ():
    orders = [batch_indices(step, count=50, batch=50, seed=seed).tolist() for step, seed in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("steps", [1, 2, 5, 100])
def test_learning_rate_warms_up_and_falls_to_zero(steps):
    schedule = learning_rates(3e-3, steps)
    rates = [float(np.asarray(schedule(step))) for step in range(steps + 1)]
    assert rates[0] == 0
    if steps == 100:
        assert rates[5] == pytest.approx(3e-3) and rates[3] == pytest.approx(3e-3 * 3 / 5)
        assert rates[5 + 95 // 2] == pytest.approx(1.5e-3, rel=0.05)
        assert rates[-1] == pytest.approx(0, abs=1e-9)
        assert max(rates) == pytest.approx(3e-3)


def test_optimizer_is_adamw():
    """The second update of one number, by the formulas of the paper."""
    optimizer = build_optimizer(0.1, steps=1000, weight_decay=0.5)
    value = jnp.asarray(2.0)
    state = optimizer.init(value)
    first_moment = second_moment = 0.0
    expected, schedule = 2.0, learning_rates(0.1, 1000)
    for step, gradient in enumerate([0.3, -1.0, 0.7], start=1):
        updates, state = optimizer.update(jnp.asarray(gradient), state, value)
        value = optax.apply_updates(value, updates)
        first_moment = 0.9 * first_moment + 0.1 * gradient
        second_moment = 0.999 * second_moment + 0.001 * gradient**2
        corrected = first_moment / (1 - 0.9**step) / (math.sqrt(second_moment / (1 - 0.999**step)) + 1e-8)
        expected -= float(np.asarray(schedule(step - 1))) * (corrected + 0.5 * expected)
    assert float(np.asarray(value)) == pytest.approx(expected, rel=1e-5)
