"""Figures of replayed policies, as ``report.measure.Summary`` has them for real runs."""

import dataclasses

import numpy as np

from entmtp_jax.calibration.replay import Replay, Trace
from entmtp_jax.types import Bool


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one policy over some texts.

    Attributes:
      tokens_per_step: new tokens over steps, all texts together.
      tokens_per_step_outside_loops: the same over the steps that start outside a repetition.
      accepted_per_step: drafts kept over steps.
      accepted_per_step_outside_loops: likewise.
      steps: by topology of the bank.
    """

    tokens_per_step: float
    tokens_per_step_outside_loops: float
    accepted_per_step: float
    accepted_per_step_outside_loops: float
    steps: list[int]


def figures(trace: Trace, found: Replay, texts: Bool[np.ndarray, " T"]) -> list[Figures]:
    """For every policy, over the chosen texts; 0 where no step was taken.

    Args:
      trace: what was replayed.
      found: its replay.
      texts: which texts to count.
    """
    new_tokens = int(trace.new_tokens[texts].sum())
    made = []
    for steps, *sums in zip(*(field[:, texts].sum(axis=1) for field in found), strict=True):
        accepted, steps_outside, emitted_outside, accepted_outside = map(int, sums)
        taken = max(int(steps.sum()), 1)
        made.append(
            Figures(
                tokens_per_step=new_tokens / taken if steps.any() else 0.0,
                tokens_per_step_outside_loops=emitted_outside / max(steps_outside, 1),
                accepted_per_step=accepted / taken,
                accepted_per_step_outside_loops=accepted_outside / max(steps_outside, 1),
                steps=steps.tolist(),
            )
        )
    return made
