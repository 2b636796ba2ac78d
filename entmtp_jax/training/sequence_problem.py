"""Training of heads that see what they draft, on packed records (``Problem`` of ``head_run``)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.training.accuracy import Accuracies, accuracies, ranks_of_targets
from entmtp_jax.training.draft_vocab import NO_COLUMN
from entmtp_jax.training.head_run import Constants, Problem
from entmtp_jax.training.losses import DraftLoss, draft_losses, weighted_sum
from entmtp_jax.training.rollout import States
from entmtp_jax.training.sequences import PADDING, Rows, SequenceBatch, batch_of_rows, look_ahead
from entmtp_jax.types import Array, Float, Int, Params

ROWS_PER_PASS = 2  # of a measure


def build_sequence_loss(states: States, kind: DraftLoss) -> Callable[..., tuple[Array, Array]]:
    """``(params, batch, constants, sampled) -> (loss, loss per depth)``.

    Depth i predicts the token 2 + i after a base; its teacher is the backbone's distribution of that token, which
    follows from the hidden state 1 + i after the base.
    """

    def loss(params: Params, batch: SequenceBatch, constants: Constants, sampled: Array | None) -> tuple[Array, Array]:
        rows = (constants.rows, constants.rows)
        losses, valid = [], []
        for depth, state in enumerate(states(params, batch, constants.embedding)):
            columns = targets(batch, depth).reshape(-1)
            flat = state.reshape(-1, state.shape[-1])
            teacher = teacher_states(batch, depth).reshape(flat.shape) if kind.teacher else None
            losses.append(draft_losses(kind, flat, teacher, columns, rows, sampled))
            valid.append(columns >= 0)
        return weighted_sum(losses, valid, kind.weights)

    return loss


def teacher_states(batch: SequenceBatch, depth: int) -> Float[Array, "R M D"]:
    """The backbone's hidden states 1 + depth after every base; of no value past the end of a record."""
    place = jnp.minimum(jnp.maximum(batch.base, 0) + depth + 1, batch.token.shape[1] - 1)
    return jnp.take_along_axis(batch.hidden, place[:, :, None], axis=1)


def targets(batch: SequenceBatch, depth: int) -> Int[Array, "R M"]:
    """Column of the token 2 + depth after every base; negative where there is none or it is not scored."""
    return look_ahead(batch, batch.column, batch.base, 2 + depth, NO_COLUMN)


def build_measure(
    states: States, rows: Rows, hidden: np.ndarray, constants: Constants, *, part: int
) -> Callable[[Params, bool], Accuracies]:
    """``(params, everything) -> Accuracies`` along the true text, from every place of held-out rows.

    Args:
      states: of the heads at their full depth.
      rows: held-out records.
      hidden: of all stored features.
      constants: matrices of the backbone.
      part: rows that are measured while training goes on.
    """

    @jax.jit
    def ranks(params: Params, batch: SequenceBatch, constants: Constants) -> tuple[Array, Array]:
        found = states(params, batch, constants.embedding)
        columns = [targets(batch, depth) for depth in range(len(found))]
        pairs = zip(found, columns, strict=True)
        placed = [ranks_of_targets(state, constants.rows, column) for state, column in pairs]
        return jnp.stack(placed, -1), jnp.stack(columns, -1)

    def measure(params: Params, everything: bool) -> Accuracies:
        count = len(rows.token) if everything else min(part, len(rows.token))
        all_ranks, all_columns = [], []
        for start in range(0, count, ROWS_PER_PASS):
            chosen = np.arange(start, start + ROWS_PER_PASS) % len(rows.token)
            batch = batch_of_rows(rows, hidden, chosen, bases=None, random=np.random.default_rng(0))
            new = chosen[: count - start]
            placed, columns = ranks(params, batch, constants)
            used = np.asarray(batch.base != PADDING)[: len(new)]
            all_ranks.append(np.asarray(placed)[: len(new)][used])
            all_columns.append(np.asarray(columns)[: len(new)][used])
        return accuracies(np.concatenate(all_ranks), np.concatenate(all_columns) != NO_COLUMN)

    return measure


def sequence_problem(
    shape: Any,
    init: Callable[[], Params],
    states: States,
    rows: Rows,
    measure: Callable[[Params, bool], Accuracies],
    hidden: np.ndarray,
    kind: DraftLoss,
    *,
    bases: int | None,
) -> Problem:
    """The problem of one kind of heads on packed records.

    Args:
      shape: of the heads.
      init: fresh parameters.
      states: of the heads, as deep as the weights go.
      rows: records to learn from.
      measure: from ``build_measure``.
      hidden: of all stored features.
      kind: the loss.
      bases: places per row from which drafts are unrolled; None for all.
    """
    return Problem(
        shape=shape,
        settings={"loss": kind.describe(), "bases": bases, "row_length": rows.token.shape[1]},
        count=len(rows.token),
        init=init,
        batch=lambda chosen, random: batch_of_rows(rows, hidden, chosen, bases=bases, random=random),
        loss=build_sequence_loss(states, kind),
        measure=measure,
    )
