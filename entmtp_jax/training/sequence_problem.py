"""Training of heads that see what they draft, on packed records (``Problem`` of ``head_run``)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.training.accuracy import Accuracies, accuracies, ranks_of_targets
from entmtp_jax.training.draft_vocab import NO_COLUMN
from entmtp_jax.training.head_run import Constants, Problem
from entmtp_jax.training.losses import DraftLoss, cross_entropy, divergence, weighted_logits, weighted_sum
from entmtp_jax.training.rollout import States
from entmtp_jax.training.sequences import PADDING, Rows, SequenceBatch, batch_of_rows, look_ahead
from entmtp_jax.types import Array, Float, Int, Params

EVAL_ROWS = 2  # per pass


def build_sequence_loss(states: States, kind: DraftLoss) -> Callable[..., tuple[Array, Array]]:
    """``(params, batch, constants, sampled) -> (loss, loss per depth)``.

    Depth i predicts the token 2 + i after a base; its teacher is the backbone's distribution of that token, which
    follows from the hidden state 1 + i after the base.
    """

    def one_depth(
        state: Float[Array, "R M D"], depth: int, batch: SequenceBatch, constants: Constants, sampled: Array | None
    ) -> tuple[Array, Array]:
        column = targets(batch, depth).reshape(-1)
        flat = state.reshape(-1, state.shape[-1])
        logits, target = weighted_logits(flat, constants.rows, jnp.maximum(column, 0), sampled)
        loss = (1 - kind.teacher) * cross_entropy(logits, target)
        if kind.teacher:
            place = jnp.minimum(jnp.maximum(batch.base, 0) + depth + 1, batch.token.shape[1] - 1)
            teacher = jnp.take_along_axis(batch.hidden, place[:, :, None], axis=1).reshape(flat.shape)
            known, _ = weighted_logits(teacher.astype(jnp.float32), constants.rows, jnp.maximum(column, 0), sampled)
            loss += kind.teacher * divergence(logits, known)
        return loss, column >= 0

    def loss(params: Params, batch: SequenceBatch, constants: Constants, sampled: Array | None) -> tuple[Array, Array]:
        found = states(params, batch, constants.embedding)
        losses, valid = zip(
            *(one_depth(state, depth, batch, constants, sampled) for depth, state in enumerate(found)), strict=True
        )
        return weighted_sum(losses, valid, kind.weights)

    return loss


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
        for start in range(0, count, EVAL_ROWS):
            chosen = np.arange(start, start + EVAL_ROWS) % len(rows.token)
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
    train: tuple[States, Rows],
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
      train: their states as deep as the weights go, and the rows to learn from.
      measure: from ``build_measure``.
      hidden: of all stored features.
      kind: the loss.
      bases: places per row from which drafts are unrolled; None for all.
    """
    states, rows = train
    return Problem(
        shape=shape,
        count=len(rows.token),
        init=init,
        batch=lambda chosen, random: batch_of_rows(rows, hidden, chosen, bases=bases, random=random),
        loss=build_sequence_loss(states, kind),
        measure=measure,
    )
