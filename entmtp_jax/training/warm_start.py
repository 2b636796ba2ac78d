"""Training that goes on from trained heads instead of fresh ones: on more data, or for a backbone tuned further."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from entmtp_jax.checkpoints.head_files import HeadInfo, StoredHead, read_head
from entmtp_jax.checkpoints.head_kinds import HeadShape, kind_of
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.training.head_run import Problem
from entmtp_jax.types import Array, Float, Int


def start_from(problem: Problem, folder: Path, backbone: BackboneConfig, scored: Int[np.ndarray, " X"]) -> Problem:
    """The same problem, with the parameters of trained heads at the start.

    Args:
      problem: with fresh parameters.
      folder: of the heads. Their draft vocabulary may be another one.
      backbone: shape of the frozen model.
      scored: ids that the heads are going to score, column by column.

    Raises:
      UserError: heads of another kind or shape, a damaged file, or output rows that the heads own but not for all of
        these ids.
    """
    head = read_head(folder, backbone)
    _check_shape(problem.shape, head.info, folder)
    params = head.params
    if "output" in params:
        params = params | {"output": _rows_of(params["output"], head, scored, folder)}
    start = {"weights_sha256": head.info.weights_sha256}
    return problem._replace(init=lambda: params, settings=problem.settings | {"start": start})


def _check_shape(wanted: HeadShape, info: HeadInfo, folder: Path) -> None:
    if info.kind != kind_of(wanted):
        raise UserError(f"{folder}: holds {info.kind} heads, but {kind_of(wanted)} heads are to be trained")
    given = dataclasses.asdict(info.shape)
    for name, value in dataclasses.asdict(wanted).items():
        if given[name] != value and name != "draft_vocab_size":
            raise UserError(
                f"{folder}: holds {info.kind} heads with {name} {given[name]}, but {value} is asked for; give the "
                "flags that they were trained with, or leave --start out"
            )


def _rows_of(
    output: Float[Array, "K Y D"], head: StoredHead, scored: Int[np.ndarray, " X"], folder: Path
) -> Float[Array, "K X D"]:
    """Rows of other ids, or in another order.

    Example: rows of the ids [7, 3, 5] for [3, 7] are the second and the first.
    """
    known = np.arange(output.shape[1]) if head.draft_ids is None else head.draft_ids
    place = {int(token): row for row, token in enumerate(known)}
    if unknown := [int(token) for token in scored if int(token) not in place]:
        raise UserError(
            f"{folder}: these heads own their output rows and have none for {len(unknown)} of the {len(scored)} scored "
            f"ids, such as {unknown[0]}; lower --draft-vocab, or leave --start out"
        )
    return jnp.take(output, np.array([place[int(token)] for token in scored]), axis=1)
