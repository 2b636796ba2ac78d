"""``docs/assumptions.md`` names tests that exist; and the assumptions that no other test holds."""

import re
from pathlib import Path

import numpy as np
import pytest

from entmtp_jax.scheduler import Signal, fixed, force
from tests.decoding import NUM_TOPOLOGIES, PROMPTS, decode, noisy_ranks

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "assumptions.md").read_text(encoding="utf-8"))


def test_the_list_names_tests():
    assert len(NAMED) > 40


@pytest.mark.parametrize(("file", "test"), sorted(set(NAMED)), ids="::".join)
def test_every_named_test_exists(file, test):
    assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("window", [1.0, 4.0])
def test_the_average_starts_with_the_prefill_and_moves_once_per_step(window):
    """The signal of step i is the average of the entropies at roots 0 .. i; root 0 is the prefill's token."""
    policy = fixed(2, num_topologies=NUM_TOPOLOGIES, window=window)
    signals = decode([PROMPTS[2]], policy, true_rank=noisy_ranks(1)).completions[0].signals
    decay, raw = 1 - 1 / window, 0.0
    for i, entropy in enumerate(signals[:, Signal.ENTROPY]):
        raw = decay * raw + (1 - decay) * entropy
        np.testing.assert_allclose(signals[i, Signal.ENTROPY_EMA], raw / (1 - decay ** (i + 1)), rtol=1e-5)
    assert signals[0, Signal.ENTROPY_EMA] == pytest.approx(signals[0, Signal.ENTROPY])
    assert np.ptp(signals[:, Signal.ENTROPY]) > 0.1, "the example must vary"


def test_the_average_of_accepted_lengths_skips_steps_that_drafted_nothing():
    window, decay = 4.0, 0.75
    schedule = [0, 2, 0, 0, 3, 2, 0, 2] * 4  # topology 0 is plain decoding
    policy = force(fixed(2, num_topologies=NUM_TOPOLOGIES, window=window), schedule)
    done = decode([PROMPTS[2]], policy, true_rank=noisy_ranks(1)).completions[0]
    raw, updates, expected = 0.0, 0, []
    for topology, accepted in zip(done.topologies, done.accepted, strict=True):
        expected.append(raw / (1 - decay**updates) if updates else 0.0)  # known before the step
        if topology > 0:
            raw, updates = decay * raw + (1 - decay) * accepted, updates + 1
    assert len(set(done.accepted)) > 2 and updates < done.steps, "the example must vary"
    np.testing.assert_allclose(done.signals[:, Signal.ACCEPTED_EMA], expected, rtol=1e-5)
