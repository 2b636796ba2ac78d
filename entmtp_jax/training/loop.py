"""The training loop: updates, log lines, held-out measures and checkpoints; killed at any moment it resumes.

The step index alone decides which positions an update sees, and a checkpoint holds all that training
changes. So a run that was killed and started again ends with the same parameters, bit for bit.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from entmtp_jax.errors import UserError
from entmtp_jax.training.optimizer import TrainState
from entmtp_jax.types import Params

LOG_FILE = "log.jsonl"
CHECKPOINT_FOLDER = "checkpoints"

Update = Callable[[TrainState, int], tuple[TrainState, dict[str, Any]]]
Evaluate = Callable[[Params], dict[str, Any]]
Report = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long to train and how often to look.

    Attributes:
      steps: updates in all.
      log_every: updates between two log lines.
      eval_every: updates between two evaluations on held-out positions; 0 for none before the end.
      checkpoint_every: updates between two checkpoints; a kill loses at most so many.
    """

    steps: int
    log_every: int = 10
    eval_every: int = 200
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        if min(self.steps, self.log_every, self.checkpoint_every) < 1 or self.eval_every < 0:
            raise UserError(f"steps and intervals must be positive; got {self}")


def batch_indices(step: int, *, count: int, batch: int, seed: int) -> np.ndarray:
    """Which of ``count`` positions update ``step`` sees: its slice of the epoch's own permutation.

    Example: 10 positions, batches of 4: updates 0 and 1 see eight different positions, update 2 begins the
    next epoch with a new permutation; the two positions left over are other ones every epoch.

    Raises:
      UserError: fewer positions than a batch holds.
    """
    if count < batch:
        raise UserError(f"only {count} training positions for a batch of {batch}; lower --batch or add records")
    epoch, place = divmod(step, count // batch)
    return _epoch_order(count, seed, epoch)[place * batch : (place + 1) * batch]


@functools.lru_cache(maxsize=1)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def run_loop(
    state: TrainState, config: LoopConfig, *, folder: Path, update: Update, evaluate: Evaluate, report: Report
) -> TrainState:
    """Trains from the last checkpoint in ``folder``, or from ``state`` if there is none, to the end.

    Args:
      state: fresh state; also tells the shapes of a checkpoint.
      config: lengths and intervals.
      folder: of this run; holds the checkpoints and ``log.jsonl``.
      update: ``(state, step) -> (state, measures)``; consumes the state.
      evaluate: held-out measures of parameters.
      report: gets every line of the log as it is written.

    Returns:
      The state after ``config.steps`` updates.

    Raises:
      UserError: the folder's checkpoints cannot be read as this state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_checkpoints(folder) as checkpoints:
        state = restore_latest(checkpoints, state)
        first = int(state.step)
        trim_log(folder / LOG_FILE, last_step=first)
        began = time.perf_counter()
        for step in range(first, config.steps):
            state, measures = update(state, step)
            done = step + 1
            if done % config.log_every == 0 or done == config.steps:
                pace = (done - first) / (time.perf_counter() - began)
                _log(folder / LOG_FILE, report, {"step": done, **_plain(measures), "steps_per_s": pace})
            if config.eval_every and done % config.eval_every == 0 and done < config.steps:
                _log(folder / LOG_FILE, report, {"step": done, "held_out": evaluate(state.params)})
            if done % config.checkpoint_every == 0 or done == config.steps:
                checkpoints.save(done, args=ocp.args.StandardSave(state))
    return state


def open_checkpoints(folder: Path) -> ocp.CheckpointManager:
    """The last two checkpoints of a run; one that was cut off while it was written is removed."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True, create=True
    )
    return ocp.CheckpointManager((folder / CHECKPOINT_FOLDER).absolute(), options=options)


def restore_latest(checkpoints: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """The newest checkpoint, or ``state`` if there is none yet.

    Raises:
      UserError: it holds other shapes, or it is damaged.
    """
    latest = checkpoints.latest_step()
    if latest is None:
        return state
    try:
        restored: Any = checkpoints.restore(latest, args=ocp.args.StandardRestore(jax.eval_shape(lambda: state)))
        return restored
    except (ValueError, KeyError, OSError) as error:
        place = Path(checkpoints.directory) / str(latest)
        line = " ".join(str(error).split())[:200]
        raise UserError(f"{place}: cannot be read as this run's state ({line}); remove it to go on") from None


def trim_log(file: Path, *, last_step: int) -> None:
    """Drops the lines of updates that are going to be done again, and a half-written last line."""
    if not file.exists():
        return
    kept = [line for line in file.read_text(encoding="utf-8").splitlines() if _step_of(line) <= last_step]
    temporary = file.with_name(file.name + ".partial")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(file)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _log(file: Path, report: Report, line: dict[str, Any]) -> None:
    with open(file, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(line) + "\n")
    report(line)


def _plain(measures: dict[str, Any]) -> dict[str, Any]:
    """Device arrays as floats and lists with six significant digits."""
    return {name: _rounded(np.asarray(value).tolist()) for name, value in measures.items()}


def _rounded(value: Any) -> Any:
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.6g}")
