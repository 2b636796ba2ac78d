"""Figures of completions on hand-worked cases, and the parity report."""

import types

import numpy as np
import pytest

from entmtp_jax.bank import Bank
from entmtp_jax.generation import Completion
from entmtp_jax.report.measure import Run, summarise
from entmtp_jax.report.parity import compare
from entmtp_jax.report.stats import (
    acceptance_by_depth,
    completion_stats,
    outside_loops,
    repeated_3gram_ratio,
    steps_outside_loops,
)
from entmtp_jax.scheduler import NUM_SIGNALS
from entmtp_jax.topology import autoregressive, chain

BANK = Bank("b", (autoregressive(), chain(2)))


def completion(tokens, topologies, accepted):
    signals = np.zeros((len(topologies), NUM_SIGNALS))
    signals[:, 1] = np.arange(len(topologies))
    accepted = np.asarray(accepted, int)
    return Completion(tokens, "length", np.asarray(topologies, int), accepted, accepted + 1, signals)


EXAMPLE = completion([1, 2, 3, 4, 5, 6, 7], [1, 0, 1], [2, 0, 1])


def test_stats_of_a_hand_worked_run():
    stats = completion_stats(EXAMPLE, BANK, prefill_s=0.5, decode_s=2.0)
    assert stats["new_tokens"] == 7 and stats["steps"] == 3
    assert stats["tokens_per_step"] == pytest.approx(7 / 3)
    assert stats["tokens_per_s"] == pytest.approx(3.5)
    assert stats["topology_steps"] == {"chain2": 2, "ar": 1}
    assert stats["accepted_histogram"] == [1, 1, 1]
    assert stats["entropy_mean_nats"] == pytest.approx(1.0)


def test_a_run_without_steps_has_no_rates():
    stats = completion_stats(completion([5], [], []), BANK, prefill_s=0.5, decode_s=0.0)
    assert stats["tokens_per_step"] is None and stats["tokens_per_s"] is None and stats["topology_steps"] == {}


def test_plain_steps_do_not_count_against_acceptance():
    assert acceptance_by_depth([EXAMPLE], BANK) == [(2, 2), (1, 2)]


@pytest.mark.parametrize(
    ("tokens", "ratio"), [([], 0.0), ([1, 2], 0.0), ([1, 2, 3, 4], 0.0), ([1, 1, 1, 1], 0.5), ([1, 2, 3] * 3, 4 / 7)]
)
def test_repeated_3grams(tokens, ratio):
    assert repeated_3gram_ratio(tokens) == pytest.approx(ratio)


def test_outside_loops_marks_the_first_occurrence_only():
    assert outside_loops([1, 2, 3, 1, 2, 3, 9]).tolist() == [True] * 5 + [False, True]
    # Steps emit [2, 3, 1], [2] and [3, 9]: the third starts with the token that ends a repeated 3-gram.
    looping = completion([1, 2, 3, 1, 2, 3, 9], [1, 0, 1], [2, 0, 1])
    assert steps_outside_loops(looping).tolist() == [True, True, False]


def test_parity_names_the_first_difference_and_asks_for_the_margin_there():
    asked = []

    def margin(text):
        asked.append(list(text))
        return 0.25

    assert compare([7], [1, 2, 3], [1, 2, 3], margin) == (True, None, None)
    assert compare([7], [1, 2, 3], [1, 9, 3], margin) == (False, 1, 0.25)
    assert compare([7], [1, 2], [1, 2, 3], margin) == (False, 2, 0.25)
    assert asked == [[7, 1], [7, 1, 2]]


def test_a_summary_weighs_prompts_by_their_tokens():
    plain = completion([1, 2, 3, 4, 5, 6, 7], [0] * 6, [0] * 6)
    summary = summarise([[Run(EXAMPLE, 1.0)], [Run(EXAMPLE, 3.0)]], [[Run(plain, 2.0)], [Run(plain, 4.0)]], BANK)
    assert summary.tokens_per_step == pytest.approx(14 / 6)
    assert summary.speedup == pytest.approx(6.0 / 4.0)
    assert summary.topology_shares == {"ar": pytest.approx(1 / 3), "chain2": pytest.approx(2 / 3)}
    assert summary.different == 0 and summary.tokens_per_s == pytest.approx(3.5)


def test_every_public_name_can_be_imported():
    import entmtp_jax

    for name in entmtp_jax.__all__:
        assert not isinstance(getattr(entmtp_jax, name), types.ModuleType), "a module of that name hides it"
    with pytest.raises(AttributeError, match="nonsense"):
        entmtp_jax.nonsense  # noqa: B018
