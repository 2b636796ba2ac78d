"""At temperature 0 and in float32 every topology, head and schedule writes what plain decoding writes.

The reference is a NumPy decoder without cache or tree (``entmtp_jax.testing.reference``). On the tiny
model no difference is excused.
"""

import numpy as np
import pytest

from entmtp_jax.scheduler import force, hysteresis, ladder
from tests.decoding import (
    BANK,
    NUM_TOPOLOGIES,
    PROMPTS,
    continuation,
    decode,
    fixed_policy,
    noisy_ranks,
    reference,
)

RANKS = {"oracle": 0, "adversary": -1, "noisy": noisy_ranks()}
SCHEDULES = {
    "alternating": [0, 4] * 30,
    "random": np.random.default_rng(1).integers(0, NUM_TOPOLOGIES, 60).tolist(),
    "skip then deep": [0] * 7 + [2] * 40,
    "every one": list(range(NUM_TOPOLOGIES)) * 10,
}


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
@pytest.mark.parametrize("behaviour", RANKS)
def test_every_topology_writes_plain_text(prompt, behaviour):
    for index in range(NUM_TOPOLOGIES):
        done = decode([prompt], fixed_policy(index), true_rank=RANKS[behaviour]).completions[0]
        assert done.tokens == continuation(prompt, 40), BANK.topologies[index].name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("behaviour", RANKS)
def test_every_schedule_writes_plain_text(schedule, behaviour):
    policy = force(fixed_policy(0), SCHEDULES[schedule])
    for prompt in PROMPTS:
        done = decode([prompt], policy, true_rank=RANKS[behaviour]).completions[0]
        assert done.tokens == continuation(prompt, 40)
        assert done.topologies.tolist() == SCHEDULES[schedule][: done.steps]


@pytest.mark.parametrize("kind", ["lookup", "medusa"])
def test_real_heads_write_plain_text(kind):
    for prompt in PROMPTS:
        for policy in [*map(fixed_policy, range(NUM_TOPOLOGIES)), force(fixed_policy(0), SCHEDULES["random"])]:
            done = decode([prompt], policy, kind=kind, max_new_tokens=30).completions[0]
            assert done.tokens == continuation(prompt, 30)


@pytest.mark.parametrize("edges", [[0.0], [1e9], [1.0], [0.5, 2.0]], ids=str)
def test_entropy_policies_write_plain_text(edges):
    bins = list(range(NUM_TOPOLOGIES))[-len(edges) - 1 :]
    policies = [
        ladder(bins, edges, num_topologies=NUM_TOPOLOGIES),
        hysteresis([bins] * (NUM_TOPOLOGIES - 1) + [bins[::-1]], edges),
    ]
    for policy in policies:
        done = decode([PROMPTS[0]], policy, true_rank=noisy_ranks(3)).completions[0]
        assert done.tokens == continuation(PROMPTS[0], 40)


def test_entropy_decides_on_the_device():
    """The recorded choices are those of the recorded signals, so the switch really follows the entropy."""
    plain = decode([PROMPTS[2]], fixed_policy(0)).completions[0]
    edge = float(np.median(plain.signals[:, 0]))
    policy = ladder([2, 4], [edge], num_topologies=NUM_TOPOLOGIES)
    done = decode([PROMPTS[2]], policy, true_rank=noisy_ranks(4)).completions[0]
    expected = np.where(done.signals[:, 0] >= np.float32(edge), 4, 2)
    assert done.topologies.tolist() == expected.tolist()
    assert set(expected) == {2, 4}, "the example must switch"


@pytest.mark.parametrize("fresh", [False, True])
def test_both_timings_write_plain_text(fresh):
    policy = force(fixed_policy(0), SCHEDULES["every one"])
    done = decode([PROMPTS[0]], policy, kind="medusa", fresh=fresh).completions[0]
    assert done.tokens == continuation(PROMPTS[0], 40)
    assert (done.signals[:, 4] > 0).all() if fresh else (done.signals[:, 4] == 0).all(), "path value"


def test_oracle_drafts_are_all_accepted():
    """60 tokens after the first: every tree keeps the oracle's rank-0 path whole in every step."""
    for index, topology in enumerate(BANK.topologies):
        done = decode([PROMPTS[0]], fixed_policy(index), max_new_tokens=61).completions[0]
        greedy = max((len(path) for path in topology.rank_paths if not any(path)), default=0)
        assert (done.accepted[:-1] == greedy).all()
        assert done.steps == -(-60 // (greedy + 1))


def test_adversary_drafts_are_never_accepted():
    done = decode([PROMPTS[0]], fixed_policy(4), true_rank=-1, max_new_tokens=31).completions[0]
    assert done.steps == 30 and not done.accepted.any()


def test_resuming_after_plain_steps_loses_nothing():
    """Depth 0 advances the head too: after 7 plain steps the oracle is right at once."""
    done = decode([PROMPTS[0]], force(fixed_policy(2), [0] * 7), max_new_tokens=48).completions[0]
    assert done.accepted[:7].tolist() == [0] * 7
    assert (done.accepted[7:] == 4).all()


def test_accepted_and_steps_add_up():
    """Every step emits its accepted drafts and one bonus token; the prefill emits the first token."""
    policy = force(fixed_policy(0), SCHEDULES["random"])
    done = decode([PROMPTS[0]], policy, true_rank=noisy_ranks(5), max_new_tokens=33).completions[0]
    assert len(done.tokens) == 1 + done.emitted.sum() == 33
    assert (done.emitted[:-1] == done.accepted[:-1] + 1).all()


def test_the_tiny_model_has_no_near_ties():
    margins = [margin for prompt in PROMPTS for margin in reference(tuple(prompt), 80).margins]
    assert min(margins) > 1e-3, "equality on this model would be luck"


def test_repeated_runs_are_identical():
    policy = force(fixed_policy(0), SCHEDULES["random"])
    runs = [decode([PROMPTS[4]], policy, true_rank=noisy_ranks(6)).completions[0] for _ in range(5)]
    assert len({(tuple(run.tokens), tuple(run.accepted)) for run in runs}) == 1
