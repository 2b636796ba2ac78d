"""Loss and update of Medusa heads on stored hidden states of a frozen backbone."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from entmtp_jax.heads.medusa import MedusaBlocks, MedusaConfig
from entmtp_jax.training.optimizer import TrainState
from entmtp_jax.types import Array, Bool, Float, Int, Params

HEAD_DECAY = 0.8  # Medusa, section 2.2.1: lambda_k is the k-th power of 0.8
NUM_FREQUENT = 1024  # columns that a sampled softmax always scores

Measures = dict[str, Array]


class Batch(NamedTuple):
    """Positions to learn from.

    Attributes:
      hidden: ``[n, D]`` final normed hidden states of positions t, any float type.
      columns: ``[n, K]`` scored column of the tokens at t+2 .. t+1+K; negative where there is none.
    """

    hidden: Float[Array, "n D"]
    columns: Int[Array, "n K"]


def init_params(config: MedusaConfig, rows: Float[Array, "X D"], seed: int) -> Params:
    """Fresh heads that repeat the backbone's own next-token guess: blocks at zero, output rows the backbone's.

    Args:
      config: shape of the heads.
      rows: the backbone's output rows of the scored ids.
      seed: of whatever starts at random.
    """
    one = jnp.zeros((1, config.hidden_size))
    params = dict(MedusaBlocks(config).init(jax.random.key(seed), one, rows, config.num_heads)["params"])
    if config.own_output:
        params["output"] = jnp.broadcast_to(rows.astype(jnp.float32), (config.num_heads, *rows.shape))
    return params


def build_scores(config: MedusaConfig) -> Callable[[Params, Array, Array], list[Array]]:
    """``(params, hidden[n, D], rows[X, D]) -> K arrays [n, X]``: every head's logits of the scored ids."""
    module = MedusaBlocks(config)

    def scores(params: Params, hidden: Float[Array, "n D"], rows: Float[Array, "X D"]) -> list[Array]:
        logits: Any = module.apply({"params": params}, hidden.astype(jnp.float32), rows, config.num_heads)
        return logits

    return scores


def weighted_mean(nll: Float[Array, "n K"], valid: Bool[Array, "n K"]) -> tuple[Float[Array, ""], Float[Array, " K"]]:
    """Medusa's loss ``sum_k 0.8^k mean_t nll[t, k]`` (section 2.2.1; k from 0) over the valid targets.

    Example: nll ``[[1, 2], [3, 9]]``, all valid but the 9: means ``[2, 2]``, loss 2 + 0.8 * 2 = 3.6.

    Args:
      nll: negative log-likelihoods in nats.
      valid: False where there is no target or it is not scored.

    Returns:
      The loss and each head's unweighted mean.
    """
    per_head = jnp.where(valid, nll, 0.0).sum(axis=0) / jnp.maximum(valid.sum(axis=0), 1)
    return (per_head * HEAD_DECAY ** jnp.arange(nll.shape[1])).sum(), per_head


def full_nll(logits: Float[Array, "n X"], columns: Int[Array, " n"]) -> Float[Array, " n"]:
    """Negative log-likelihoods of the target columns, in nats."""
    return jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, columns[:, None], axis=1)[:, 0]


def sampled_nll(
    logits: Float[Array, "n S"],
    true: Float[Array, " n"],
    columns: Int[Array, " n"],
    sampled: Int[Array, " m"],
    num_rare: int,
) -> Float[Array, " n"]:
    """Negative log-likelihoods with the rare columns' part of the partition function estimated from a sample.

    ``Z = sum_{frequent j} e^{l_j} + num_rare / m * sum_{sampled j != target} e^{l_j} + [target is rare] e^{l_target}``
    is unbiased for the full sum under uniform sampling (importance sampling; Bengio and Senecal 2008).

    Example: four columns with logit 0, column 0 frequent, of the three rare ones only column 2 sampled.
    Target 0: Z = 1 + 3 * 1 = 4, the full sum. Target 2: Z = 1 + 0 + 1 = 2. Target 3: Z = 1 + 3 + 1 = 5.

    Args:
      logits: of the frequent columns, then of the sampled ones.
      true: logit of the target.
      columns: target columns, at least 0.
      sampled: distinct rare columns.
      num_rare: how many rare columns there are; they come after all frequent ones.
    """
    num_frequent = logits.shape[1] - sampled.shape[0]
    weighted = logits[:, num_frequent:] + math.log(num_rare / sampled.shape[0])
    rare = jnp.where(sampled == columns[:, None], -jnp.inf, weighted)
    own = jnp.where(columns >= num_frequent, true, -jnp.inf)
    parts = [logits[:, :num_frequent], rare, own[:, None]]
    return jax.nn.logsumexp(jnp.concatenate(parts, axis=1), axis=1) - true


def build_loss(config: MedusaConfig) -> Callable[..., tuple[Array, Array]]:
    """``(params, batch, rows, sampled) -> (loss, loss per head)``, not compiled.

    ``rows`` are the ``[X, D]`` output rows of the scored ids, the most frequent first; ``sampled`` the
    ``[m]`` rare columns that stand for all rare ones in this update, or None for the full softmax.
    """
    scores = build_scores(config)

    def full(params: Params, batch: Batch, rows: Float[Array, "X D"]) -> list[Array]:
        logits = scores(params, batch.hidden, rows)
        return [full_nll(*pair) for pair in zip(logits, jnp.maximum(batch.columns, 0).T, strict=True)]

    def estimated(params: Params, batch: Batch, rows: Float[Array, "X D"], sampled: Int[Array, " m"]) -> list[Array]:
        # The scores against the identity are the blocks' outputs themselves; the targets' logits come from these.
        picked = jnp.concatenate([rows[:NUM_FREQUENT], rows[sampled], jnp.eye(config.hidden_size)])
        nll = []
        for score, column in zip(scores(params, batch.hidden, picked), jnp.maximum(batch.columns, 0).T, strict=True):
            logits, state = jnp.split(score, [NUM_FREQUENT + sampled.shape[0]], axis=1)
            true = (state * rows[column]).sum(axis=1)
            nll.append(sampled_nll(logits, true, column, sampled, rows.shape[0] - NUM_FREQUENT))
        return nll

    def loss(
        params: Params, batch: Batch, rows: Float[Array, "X D"], sampled: Int[Array, " m"] | None
    ) -> tuple[Array, Array]:
        nll = full(params, batch, rows) if sampled is None else estimated(params, batch, rows, sampled)
        return weighted_mean(jnp.stack(nll, axis=1), batch.columns >= 0)

    return loss


def build_train_step(
    config: MedusaConfig, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, Measures]]:
    """One update ``(state, batch, rows, sampled) -> (state, measures)``, compiled; consumes the state.

    Args:
      config: shape of the heads.
      optimizer: Optax chain.
    """
    gradient_of = jax.value_and_grad(build_loss(config), has_aux=True)

    def step(
        state: TrainState, batch: Batch, rows: Float[Array, "X D"], sampled: Int[Array, " m"] | None
    ) -> tuple[TrainState, Measures]:
        (loss, per_head), gradient = gradient_of(state.params, batch, rows, sampled)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        squares = sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(gradient))
        measures = {"loss": loss, "loss_by_head": per_head, "gradient_norm": jnp.sqrt(squares)}
        return TrainState(state.step + 1, params, optimizer_state), measures

    return jax.jit(step, donate_argnums=0)
