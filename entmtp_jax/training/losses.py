"""Losses on the scores of the draft vocabulary: cross-entropy on the data and KL to the backbone's distribution.

A head is trained on its *state* ``s``, the vector whose products with the output rows are its logits. With
many scored ids these products are most of the work, so they may be estimated: the ``NUM_FREQUENT`` most
frequent columns always, a uniform sample of the rare ones with weight ``num_rare / m``, and the target.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entmtp_jax.backbone.precision import Linear, linear_highest
from entmtp_jax.types import Array, Bool, Float, Int

NUM_FREQUENT = 1024  # columns that a sampled softmax always scores


class DraftLoss(NamedTuple):
    """What is minimised: ``sum_i w_i mean_t [(1 - a) CE_i + a KL_i]``.

    Attributes:
      weights: w_i of every depth.
      teacher: a, share of the divergence from the backbone's distribution; the rest is cross-entropy on the data.
      linear: the matrix product of states and output rows.
    """

    weights: tuple[float, ...]
    teacher: float = 0.0
    linear: Linear = linear_highest

    def describe(self) -> dict[str, Any]:
        """What of it decides a run's result, as plain values."""
        return {"weights": list(self.weights), "teacher": self.teacher, "product": self.linear.__name__}


def weighted_logits(
    state: Float[Array, "n D"],
    rows: Float[Array, "X D"],
    columns: Int[Array, " n"],
    sampled: Int[Array, " m"] | None,
    linear: Linear = linear_highest,
) -> tuple[Float[Array, "n Y"], Int[Array, " n"]]:
    """Logits whose exponentials sum to the partition function or to an unbiased estimate of it.

    ``Z = sum_{frequent j} e^{l_j} + num_rare / m * sum_{sampled j != target} e^{l_j} + [target is rare] e^{l_target}``
    under uniform sampling (importance sampling; Bengio and Senecal 2008): a sampled column's logit is raised by
    ``log(num_rare / m)``.

    Example: four columns with logit 0, column 0 frequent, of the three rare ones only column 2 sampled.
    Target 0: Z = 1 + 3 * 1 = 4, the full sum. Target 2: Z = 1 + 0 + 1 = 2. Target 3: Z = 1 + 3 + 1 = 5.

    Args:
      state: of the head, or of its teacher.
      rows: output rows of the scored ids, the most frequent first.
      columns: target columns, at least 0.
      sampled: distinct rare columns; None scores every column.
      linear: the matrix product.

    Returns:
      The logits, and where among them the target stands.
    """
    if sampled is None:
        return linear(state, rows), columns
    num_frequent = min(NUM_FREQUENT, rows.shape[0])
    num_rare = rows.shape[0] - num_frequent
    logits = linear(state, jnp.concatenate([rows[:num_frequent], rows[sampled]]))
    frequent, rare = jnp.split(logits, [num_frequent], axis=1)
    rare = jnp.where(sampled == columns[:, None], -jnp.inf, rare + math.log(num_rare / sampled.shape[0]))
    own = (state * rows[columns]).sum(axis=1)
    is_rare = columns >= num_frequent
    own = jnp.where(is_rare, own, -jnp.inf)
    place = jnp.where(is_rare, logits.shape[1], columns)
    return jnp.concatenate([frequent, rare, own[:, None]], axis=1), place


def cross_entropy(logits: Float[Array, "n Y"], target: Int[Array, " n"]) -> Float[Array, " n"]:
    """Negative log-likelihood of the target, in nats."""
    return jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]


def divergence(logits: Float[Array, "n Y"], teacher: Float[Array, "n Y"]) -> Float[Array, " n"]:
    """``KL(teacher || head)`` in nats over the same weighted columns (Hinton et al. 2015; Hydra's teacher loss)."""
    teacher_logprobs = jax.nn.log_softmax(jax.lax.stop_gradient(teacher), axis=1)
    probability = jnp.exp(teacher_logprobs)
    logprobs = jax.nn.log_softmax(logits, axis=1)
    # A column that the estimate leaves out has log-probability -inf on both sides.
    return jnp.where(probability > 0, probability * (teacher_logprobs - logprobs), 0.0).sum(axis=1)


def draft_losses(
    kind: DraftLoss,
    state: Float[Array, "n D"],
    teacher: Float[Array, "n D"] | None,
    columns: Int[Array, " n"],
    rows: tuple[Float[Array, "X D"], Float[Array, "X D"]],
    sampled: Int[Array, " m"] | None,
) -> Float[Array, " n"]:
    """``(1 - a) CE + a KL`` of one depth at every position, in nats; of no value where the target is negative.

    Args:
      kind: the loss.
      state: of the head.
      teacher: the backbone's hidden states that predict the same tokens; None when its share is 0.
      columns: targets; a negative one has no loss and is read as column 0.
      rows: output rows of the head, and of the backbone.
      sampled: rare columns that stand for all of them; None for the full softmax.
    """
    columns = jnp.maximum(columns, 0)
    logits, target = weighted_logits(state, rows[0], columns, sampled, kind.linear)
    loss = (1 - kind.teacher) * cross_entropy(logits, target)
    if teacher is None:
        return loss
    known, _ = weighted_logits(teacher.astype(jnp.float32), rows[1], columns, sampled, kind.linear)
    return loss + kind.teacher * divergence(logits, known)


def depth_weights(decay: float, depth: int) -> tuple[float, ...]:
    """``decay^i``: 0.8 in Medusa (section 2.2.1); 0.6, made to sum to 1, are FastMTP's .51, .31, .18."""
    return tuple(decay**i for i in range(depth))


def weighted_sum(
    losses: Sequence[Float[Array, " n"]], valid: Sequence[Bool[Array, " n"]], weights: Sequence[float]
) -> tuple[Float[Array, ""], Float[Array, " K"]]:
    """``sum_i w_i mean_t loss_i[t]`` over the valid targets of every depth.

    Example: losses ``[1, 3]`` and ``[2, 9]``, all valid but the 9, weights 1 and 0.8: means ``[2, 2]``, sum 3.6.

    Returns:
      The sum and each depth's unweighted mean.
    """
    means = [
        jnp.where(keep, loss, 0.0).sum() / jnp.maximum(keep.sum(), 1) for loss, keep in zip(losses, valid, strict=True)
    ]
    per_depth = jnp.stack(means)
    return (per_depth * jnp.asarray(weights)).sum(), per_depth
