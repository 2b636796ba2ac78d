"""The picture of a training run: loss and held-out accuracy of every depth over the updates."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from entmtp_jax.errors import UserError
from entmtp_jax.whole_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES, DOTS_PER_INCH, COLORS = (8.0, 3.2), 90, 64


class Curve(NamedTuple):
    """What a run's log tells.

    Attributes:
      updates: with a line about the loss.
      losses: at each of them, the loss of every depth that was trained, in nats.
      measured: updates after which held-out text was measured.
      top1: at each of them, the accuracy of every depth.
    """

    updates: list[int]
    losses: list[list[float]]
    measured: list[int]
    top1: list[list[float]]


def curve_of(log: Sequence[Mapping[str, Any]], final: Sequence[float], steps: int) -> Curve:
    """Sorts the lines of ``log.jsonl``.

    Example: lines ``{"step": 2, "loss_by_head": [3, 4]}`` and ``{"step": 5, "held_out": {"top1": [0.1, 0]}}`` of a
    run of 6 updates that ended with top-1 ``[0.2, 0.1]``: losses ``[[3, 4]]`` at 2, accuracies at 5 and 6.

    Args:
      log: lines in their order; those of other keys are passed over.
      final: top-1 accuracy of the finished heads on all held-out text.
      steps: updates in all.

    Raises:
      UserError: no line is about the loss.
    """
    trained = [line for line in log if "loss_by_head" in line]
    if not trained:
        raise UserError("the log has no line about the loss, so there is no curve to draw; is it a training run's log?")
    examined = [line for line in log if "held_out" in line]
    return Curve(
        updates=[line["step"] for line in trained],
        losses=[line["loss_by_head"] for line in trained],
        measured=[*(line["step"] for line in examined), steps],
        top1=[*(line["held_out"]["top1"] for line in examined), list(final)],
    )


def draw_curve(curve: Curve, file: Path, *, title: str) -> None:
    """Writes the picture as a PNG file.

    Args:
      curve: of one run.
      file: to write; replaced only once it is complete.
      title: of the picture.

    Raises:
      ModuleNotFoundError: matplotlib is not installed; ``cli.run_main`` says what to do.
      UserError: the file cannot be written.
    """
    from matplotlib import colormaps  # here, since only the extra plots brings it
    from matplotlib.figure import Figure
    from PIL import Image  # which matplotlib itself needs

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    depth = max(len(curve.top1[-1]), len(curve.losses[-1]))
    colors = [tuple(color) for color in colormaps["viridis"]([0.9 * i / max(depth - 1, 1) for i in range(depth)])]
    _lines(loss, curve.updates, curve.losses, colors, marker=None)
    _lines(accuracy, curve.measured, curve.top1, colors, marker="o")
    loss.set(title="training loss", xlabel="update", ylabel="nats")
    accuracy.set(title="held-out top-1 accuracy", xlabel="update", ylim=(0, None))
    accuracy.legend(title="token", fontsize="small", title_fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    with replacing(file) as unfinished:  # in few colours a file takes a fraction of the bytes
        Image.open(drawn).convert("RGB").quantize(COLORS).save(unfinished, format="PNG", optimize=True)


def _lines(
    axes: "Axes",
    updates: Sequence[int],
    values: Sequence[Sequence[float]],
    colors: Sequence[tuple[float, ...]],
    *,
    marker: str | None,
) -> None:
    style = {"marker": marker, "markersize": 3, "linewidth": 1}
    for index, series in enumerate(zip(*values, strict=True)):
        axes.plot(updates, series, color=colors[index], label=f"t+{index + 2}", **style)
    axes.grid(alpha=0.3)
