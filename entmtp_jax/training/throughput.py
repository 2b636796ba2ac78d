"""How fast a run was, and what share of its time the frozen backbone took."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Throughput(NamedTuple):
    """Pace of a run's two parts; None where no time was recorded.

    Attributes:
      positions: whose hidden states are used, prompts and held-out records included.
      backbone_s: seconds of the backbone's pass over them, at the pace that was measured.
      training_s: seconds of the updates, with the checkpoints and held-out measures between them.
      trained_positions: places that all updates together read, padding and repetitions included.
    """

    positions: int
    backbone_s: float | None
    training_s: float | None
    trained_positions: int

    @property
    def backbone_share(self) -> float | None:
        """Share of the backbone in the time of both parts."""
        if self.backbone_s is None or self.training_s is None:
            return None
        return self.backbone_s / (self.backbone_s + self.training_s)

    def describe(self) -> dict[str, int | float | None]:
        """As plain values, the share included."""
        return {**self._asdict(), "backbone_share": self.backbone_share}


def measure_throughput(
    log: Sequence[dict[str, Any]], *, positions: int, backbone_pace: float | None, per_update: int
) -> Throughput:
    """Adds up what a run's log and its features tell.

    Example: 1,000 positions at 200 per second are 5 s of the backbone; two log lines of 10 updates and 20 s each,
    100 places per update, are 2,000 places in 40 s; the backbone's share is 5 / 45.

    Args:
      log: lines of ``log.jsonl``.
      positions: with stored hidden states.
      backbone_pace: positions per second, or None.
      per_update: places that one update reads.
    """
    updates = [line for line in log if "loss" in line]
    timed = bool(updates) and all("seconds" in line for line in updates)
    return Throughput(
        positions=positions,
        backbone_s=None if backbone_pace is None else round(positions / backbone_pace, 1),
        training_s=round(sum(line["seconds"] for line in updates), 1) if timed else None,
        trained_positions=updates[-1]["step"] * per_update if updates else 0,
    )
