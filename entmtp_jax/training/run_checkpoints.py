"""Checkpoints of a training run: the last two whole ones stay, whatever happens while another is written."""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from entmtp_jax.errors import UserError
from entmtp_jax.training.optimizer import TrainState

CHECKPOINT_FOLDER = "checkpoints"
UNFINISHED = "*.orbax-checkpoint-tmp"
FULL_DISK = "No space left on device"


def open_checkpoints(folder: Path) -> ocp.CheckpointManager:
    """The last two checkpoints of a run; one that was cut off while it was written is removed."""
    place = (folder / CHECKPOINT_FOLDER).absolute()
    _remove_unfinished(place)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False, create=True)
    return ocp.CheckpointManager(place, options=options)


def has_checkpoints(folder: Path) -> bool:
    """Whether a run's folder holds a whole checkpoint."""
    return any(path.name.isdecimal() for path in (folder / CHECKPOINT_FOLDER).glob("*"))


def save_checkpoint(checkpoints: ocp.CheckpointManager, step: int, state: TrainState) -> None:
    """Writes the state after ``step`` updates; older checkpoints are dropped only once it is complete.

    Raises:
      UserError: it cannot be written, for instance because the disk is full; the earlier ones are as they were.
    """
    try:
        with _quiet_threads():
            checkpoints.save(step, args=ocp.args.StandardSave(state))
    except (OSError, ValueError) as error:  # the storage layer reports a full disk as a ValueError
        place = Path(checkpoints.directory)
        _remove_unfinished(place)
        line = " ".join(str(error).split())
        reason = FULL_DISK if FULL_DISK in line else line[:200]
        latest = checkpoints.latest_step()
        kept = "there is none yet" if latest is None else f"the last good one, of update {latest}, is kept"
        raise UserError(
            f"{place / str(step)}: cannot write the checkpoint of update {step} ({reason}); {kept}: free some space "
            "and give the same command again"
        ) from None


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


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
    """Errors of writer threads are raised here anyway; their tracebacks would only bury the one line about them."""
    hook = threading.excepthook
    threading.excepthook = lambda arguments: None
    try:
        yield
    finally:
        threading.excepthook = hook


def _remove_unfinished(place: Path) -> None:
    for path in place.glob(UNFINISHED):
        shutil.rmtree(path, ignore_errors=True)
