"""The training loop: updates, log lines, held-out measures and checkpoints; killed at any moment it resumes.

The step index alone decides which positions an update sees, and a checkpoint holds all that training
changes. So a run that was killed and started again ends with the same parameters, bit for bit.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.training.json_lines import append_json_line, read_json_lines
from entmtp_jax.training.optimizer import TrainState
from entmtp_jax.training.run_checkpoints import open_checkpoints, restore_latest, save_checkpoint
from entmtp_jax.training.settings import LOG_FILE
from entmtp_jax.types import Array, Bool, Params
from entmtp_jax.whole_files import replacing

Measures = dict[str, Any]
Update = Callable[[TrainState, int], tuple[TrainState, Measures]]
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

    def logs_after(self, done: int) -> bool:
        """Whether a log line follows ``done`` updates; the last update always has one."""
        return done % self.log_every == 0 or done == self.steps

    def evaluates_after(self, done: int) -> bool:
        """Whether held-out positions are measured then; the end has a measure of its own."""
        return self.eval_every > 0 and done % self.eval_every == 0 and done < self.steps

    def keeps(self, done: int) -> bool:
        """Whether a checkpoint is written then; the last state always is."""
        return done % self.checkpoint_every == 0 or done == self.steps

    def pauses_after(self, done: int) -> bool:
        """Whether anything is looked at then."""
        return self.logs_after(done) or self.evaluates_after(done) or self.keeps(done)


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
      UserError: the folder's checkpoints cannot be read as this state or one cannot be written, or an update's
        measures are not finite: nothing that comes after it is logged, measured or kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_checkpoints(folder) as checkpoints:
        state = restore_latest(checkpoints, state)
        first = int(state.step)
        trim_log(folder / LOG_FILE, last_step=first)
        began = logged = time.perf_counter()
        unseen: list[tuple[int, Measures]] = []  # looked at together: a look waits for the device

        def write(line: dict[str, Any]) -> None:
            append_json_line(folder / LOG_FILE, line)
            report(line)

        for step in range(first, config.steps):
            state, measures = update(state, step)
            done = step + 1
            unseen.append((done, measures))
            if not config.pauses_after(done):
                continue
            check_finite(unseen, state.params, folder, last_good=checkpoints.latest_step())
            unseen.clear()
            if config.logs_after(done):
                now = time.perf_counter()
                pace = {"steps_per_s": (done - first) / (now - began), "seconds": round(now - logged, 3)}
                logged = now
                write({"step": done, **_plain(measures), **pace})
            if config.evaluates_after(done):
                write({"step": done, "held_out": evaluate(state.params)})
            if config.keeps(done):
                save_checkpoint(checkpoints, done, state)
    return state


def check_finite(
    unseen: Sequence[tuple[int, Measures]], params: Params, folder: Path, *, last_good: int | None
) -> None:
    """Stops a run whose loss, gradient or parameters have become NaN or infinite.

    Args:
      unseen: updates since the last look, with their measures.
      params: after the last of them.
      folder: of the run, for the message.
      last_good: update of the last checkpoint, or None.

    Raises:
      UserError: names the first such update.
    """
    for step, measures in unseen:
        if bad := [name for name, value in measures.items() if not np.isfinite(np.asarray(value)).all()]:
            raise _diverged(step, bad[0], folder, last_good)
    if not _all_finite(params):
        raise _diverged(unseen[-1][0], "parameters", folder, last_good)


@jax.jit
def _all_finite(params: Params) -> Bool[Array, ""]:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def _diverged(step: int, what: str, folder: Path, last_good: int | None) -> UserError:
    kept = "no checkpoint was written before" if last_good is None else f"the checkpoint of update {last_good} is kept"
    return UserError(
        f"{folder}: update {step} made {what} NaN or infinite, so training stops; {kept}, and the same command starts "
        "again from there; if it stops here again, lower --lr in another folder"
    )


def trim_log(file: Path, *, last_step: int) -> None:
    """Drops the lines of updates that are going to be done again, and a half-written last line."""
    if not file.exists():
        return
    kept = [line for line in read_json_lines(file) if isinstance(line.get("step"), int) and line["step"] <= last_step]
    with replacing(file) as unfinished:
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def _plain(measures: Measures) -> Measures:
    """Device arrays as floats and lists with six significant digits."""
    return {name: _rounded(np.asarray(value).tolist()) for name, value in measures.items()}


def _rounded(value: Any) -> Any:
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.6g}")
