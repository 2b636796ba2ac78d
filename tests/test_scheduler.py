"""Entropy, its average, and policies as tables, against hand-worked values."""

import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.entropy import corrected, empty_average, entropy_nats, update_average
from entmtp_jax.errors import UserError
from entmtp_jax.scheduler import NUM_SIGNALS, Signal, choose, fixed, force, hysteresis, ladder, reachable, renumber

LIVE = jnp.asarray([True])


def pick(policy, value, *, previous=0, step=0, signal=Signal.ENTROPY_EMA):
    signals = jnp.zeros((1, NUM_SIGNALS)).at[0, signal].set(value)
    return int(choose(policy, signals, jnp.asarray([previous]), jnp.asarray([step]), LIVE))


def test_entropy_of_known_distributions():
    logits = jnp.asarray(
        [[0.0, 0.0, 0.0, 0.0], [0.0, -jnp.inf, -jnp.inf, -jnp.inf], [jnp.log(3.0), 0.0, -jnp.inf, -jnp.inf]]
    )
    expected = [np.log(4), 0.0, -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))]
    np.testing.assert_allclose(entropy_nats(logits), expected, atol=1e-6)


def test_entropy_of_broken_logits_is_no_number():
    assert not np.isfinite(entropy_nats(jnp.asarray([[0.0, jnp.nan], [jnp.inf, 0.0]]))).any()


def test_the_average_of_a_constant_is_the_constant_from_the_first_update_on():
    average, decay = empty_average(1), jnp.float32(0.75)
    assert float(corrected(average, decay)[0]) == 0.0
    for _ in range(20):
        average = update_average(average, jnp.asarray([1.7]), decay, LIVE)
        np.testing.assert_allclose(corrected(average, decay), [1.7], rtol=1e-5)


def test_the_average_follows_its_formula_and_skips_finished_rows():
    average, decay = empty_average(2), jnp.float32(0.75)
    for value in (1.0, 3.0, 2.0):
        average = update_average(average, jnp.asarray([value, value]), decay, jnp.asarray([True, value == 1.0]))
    raw = 0.25 * (0.75**2 * 1 + 0.75 * 3 + 2)
    np.testing.assert_allclose(corrected(average, decay), [raw / (1 - 0.75**3), 1.0], rtol=1e-6)
    assert average.updates.tolist() == [3, 1]


def test_a_ladder_reads_its_bins_in_order():
    policy = ladder([2, 1, 0], [0.5, 1.5], num_topologies=3)
    assert [pick(policy, value) for value in (0.0, 0.49, 0.5, 1.49, 1.5, 99.0)] == [2, 2, 1, 1, 0, 0]


def test_hysteresis_keeps_the_previous_choice_inside_the_band():
    policy = hysteresis([[1, 0, 0], [1, 1, 0]], [1.0, 2.0])
    previous, choices = 1, []
    for value in (0.5, 1.5, 1.9, 2.0, 1.5, 1.1, 0.9, 1.5):
        previous = pick(policy, value, previous=previous)
        choices.append(previous)
    assert choices == [1, 1, 1, 0, 0, 0, 1, 1], "no toggling between 1.0 and 2.0"


def test_other_signals_are_read_from_their_columns():
    policy = ladder([0, 1], [0.5], num_topologies=2, signal=Signal.TOP1_PROB)
    assert pick(policy, 0.9, signal=Signal.TOP1_PROB) == 1
    assert pick(policy, 0.9, signal=Signal.ENTROPY) == 0


def test_forced_steps_come_first_then_the_table():
    policy = force(fixed(2, num_topologies=3), [0, 1])
    assert [pick(policy, 0.0, step=step) for step in range(4)] == [0, 1, 2, 2]
    assert pick(policy, 0.0, step=5000) == 2


def test_live_rows_vote_by_their_mean_and_finished_rows_do_not():
    policy = ladder([0, 1], [1.0], num_topologies=2)
    signals = jnp.zeros((3, NUM_SIGNALS)).at[:, 0].set(jnp.asarray([0.8, 1.4, 50.0]))
    rows = jnp.zeros(3, jnp.int32)
    assert int(choose(policy, signals, rows, rows, jnp.asarray([True, True, False]))) == 1
    assert int(choose(policy, signals, rows, rows, jnp.asarray([True, False, False]))) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ladder([0, 1], [1.0, 2.0], num_topologies=2), "3 bins"),
        (lambda: ladder([0, 1, 0], [2.0, 1.0], num_topologies=2), "ascend"),
        (lambda: ladder([0, 5], [1.0], num_topologies=2), "topology 5"),
        (lambda: ladder([0, 1], [float("nan")], num_topologies=2), "finite"),
        (lambda: ladder(list(range(9)), list(range(8)), num_topologies=9), "at most 8"),
        (lambda: fixed(0, num_topologies=1, window=0.5), "window"),
        (lambda: force(fixed(0, num_topologies=1), [3]), "topology 3"),
        (lambda: force(fixed(0, num_topologies=1), [0] * 1025), "1024"),
    ],
)
def test_impossible_policies_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


POLICIES = {
    "fixed": fixed(3, num_topologies=5),
    "ladder": ladder([4, 1, 1], [0.5, 1.5], num_topologies=5),
    "hysteresis": hysteresis([[2, 0, 0]] * 2 + [[2, 2, 0]] * 3, [1.0, 2.0]),
    "forced": force(fixed(1, num_topologies=5), [4, 0, 4]),
}


@pytest.mark.parametrize(("name", "expected"), [("fixed", [0, 3]), ("ladder", [0, 1, 4]), ("hysteresis", [0, 2])])
def test_what_a_policy_can_choose(name, expected):
    assert reachable(POLICIES[name]) == expected
    assert reachable(POLICIES["forced"]) == [0, 1, 4]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("extra", [set(), {1, 2}], ids=["needed", "more"])
def test_a_policy_for_fewer_topologies_chooses_the_same_ones(policy, extra):
    kept = sorted({*reachable(policy), *extra})
    narrow = renumber(policy, kept)
    assert narrow.table.shape[0] == len(kept)
    for place, previous in enumerate(kept):
        for value in (0.0, 0.7, 1.2, 1.7, 3.0):
            for step in (0, 1, 2, 5):
                wide = pick(policy, value, previous=previous, step=step)
                assert kept[pick(narrow, value, previous=place, step=step)] == wide


def test_what_a_policy_can_choose_must_be_kept():
    with pytest.raises(UserError, match="can choose topology 3, which is not kept"):
        renumber(POLICIES["fixed"], [0, 1])
