"""Training of Medusa heads on single positions of a frozen backbone's text (``Problem`` of ``head_run``)."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.heads.medusa import MedusaBlocks, MedusaConfig
from entmtp_jax.training.accuracy import Accuracies, accuracies, ranks_of_targets
from entmtp_jax.training.draft_vocab import NO_COLUMN
from entmtp_jax.training.examples import Examples
from entmtp_jax.training.head_run import Constants, Problem
from entmtp_jax.training.losses import DraftLoss, cross_entropy, divergence, weighted_logits, weighted_sum
from entmtp_jax.types import Array, Float, Int, Params

EVAL_POSITIONS = 1024  # per pass


class Batch(NamedTuple):
    """Positions to learn from.

    Attributes:
      hidden: ``[n, D]`` final normed hidden states of positions t, any float type.
      columns: ``[n, K]`` scored column of the tokens at t+2 .. t+1+K; negative where there is none.
      teacher: ``[n, K, D]`` hidden states at t+1 .. t+K, from which the backbone predicts these tokens.
    """

    hidden: Float[Array, "n D"]
    columns: Int[Array, "n K"]
    teacher: Float[Array, "n K D"] | None


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


def medusa_problem(
    config: MedusaConfig, examples: Examples, constants: Constants, kind: DraftLoss, *, seed: int, part: int
) -> Problem:
    """The problem of Medusa heads.

    Args:
      config: shape of the heads.
      examples: positions and targets.
      constants: matrices of the backbone.
      kind: the loss.
      seed: of the fresh heads and of the positions that are measured during training.
      part: how many these are.
    """
    interim = np.sort(np.random.default_rng(seed).permutation(examples.held_out)[:part])
    target_ranks = build_target_ranks(config)

    def measure(params: Params, everything: bool) -> Accuracies:
        chosen = examples.held_out if everything else interim
        ranks = rank_examples(target_ranks, params, examples, chosen, constants)
        return accuracies(ranks, examples.columns[chosen] != NO_COLUMN)

    def batch(chosen: Int[np.ndarray, " batch"], random: np.random.Generator) -> Batch:
        del random
        return read_batch(examples, examples.train[chosen], with_teacher=kind.teacher > 0)

    return Problem(
        shape=config,
        count=len(examples.train),
        init=lambda: init_params(config, constants.rows, seed),
        batch=batch,
        loss=build_loss(config, kind),
        measure=measure,
    )


def read_batch(examples: Examples, chosen: Int[np.ndarray, " n"], *, with_teacher: bool) -> Batch:
    """The chosen examples."""
    positions = examples.positions[chosen]
    columns = examples.columns[chosen]
    teacher = None
    if with_teacher:
        ahead = positions[:, None] + 1 + np.arange(columns.shape[1])
        teacher = jnp.asarray(examples.hidden[np.minimum(ahead, len(examples.hidden) - 1)])
    return Batch(jnp.asarray(examples.hidden[positions]), jnp.asarray(columns), teacher)


def build_loss(config: MedusaConfig, kind: DraftLoss) -> Any:
    """``(params, batch, constants, sampled) -> (loss, loss per head)``, not compiled."""
    states = build_states(config)

    def loss(params: Params, batch: Batch, constants: Constants, sampled: Array | None) -> tuple[Array, Array]:
        losses = []
        for head, state in enumerate(states(params, batch.hidden)):
            rows = params["output"][head] if config.own_output else constants.rows
            column = jnp.maximum(batch.columns[:, head], 0)
            logits, target = weighted_logits(state, rows, column, sampled)
            value = (1 - kind.teacher) * cross_entropy(logits, target)
            if batch.teacher is not None:
                teacher = batch.teacher[:, head].astype(jnp.float32)
                known, _ = weighted_logits(teacher, constants.rows, column, sampled)
                value += kind.teacher * divergence(logits, known)
            losses.append(value)
        return weighted_sum(losses, list((batch.columns >= 0).T), kind.weights)

    return loss


def build_states(config: MedusaConfig) -> Any:
    """``(params, hidden[n, D]) -> K arrays [n, D]``: what is multiplied with output rows."""
    module = MedusaBlocks(config)

    def states(params: Params, hidden: Float[Array, "n D"]) -> list[Array]:
        found = module.apply({"params": params}, hidden.astype(jnp.float32), config.num_heads, method="states")
        return cast(list[Array], found)

    return states


def build_target_ranks(config: MedusaConfig) -> Any:
    """``(params, batch, constants) -> [n, K]`` rank of every target among its head's scores, compiled."""
    states = build_states(config)

    @jax.jit
    def target_ranks(params: Params, batch: Batch, constants: Constants) -> Int[Array, "n K"]:
        found = []
        for head, state in enumerate(states(params, batch.hidden)):
            rows = params["output"][head] if config.own_output else constants.rows
            found.append(ranks_of_targets(state, rows, batch.columns[:, head]))
        return jnp.stack(found, axis=1)

    return target_ranks


def rank_examples(
    target_ranks: Any, params: Params, examples: Examples, chosen: Int[np.ndarray, " m"], constants: Constants
) -> Int[np.ndarray, "m K"]:
    """Ranks of the targets of chosen examples, in passes of one size."""
    padded = np.pad(chosen, (0, -len(chosen) % EVAL_POSITIONS))  # the padding's ranks are cut off
    starts = range(0, len(padded), EVAL_POSITIONS)
    parts = (read_batch(examples, padded[s : s + EVAL_POSITIONS], with_teacher=False) for s in starts)
    return np.concatenate([np.asarray(target_ranks(params, part, constants)) for part in parts])[: len(chosen)]
