"""Training of Medusa heads on single positions of a frozen backbone's text (``Problem`` of ``head_run``)."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.heads.medusa import MedusaBlocks, MedusaConfig, init_medusa
from entmtp_jax.training.accuracy import Accuracies, accuracies, ranks_of_targets
from entmtp_jax.training.draft_vocab import NO_COLUMN
from entmtp_jax.training.examples import Examples
from entmtp_jax.training.head_run import Constants, Problem
from entmtp_jax.training.losses import DraftLoss, draft_losses, weighted_sum
from entmtp_jax.types import Array, Float, Int, Params

POSITIONS_PER_PASS = 1024  # of a measure


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
    params = dict(init_medusa(config, jax.random.key(seed)))
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
        settings={"loss": kind.describe()},
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


def build_loss(config: MedusaConfig, kind: DraftLoss) -> Callable[..., tuple[Array, Array]]:
    """``(params, batch, constants, sampled) -> (loss, loss per head)``, not compiled."""
    module = MedusaBlocks(config, kind.linear)

    def loss(params: Params, batch: Batch, constants: Constants, sampled: Array | None) -> tuple[Array, Array]:
        losses = []
        for head, state in enumerate(states_of(module, params, batch)):
            rows = params["output"][head] if config.own_output else constants.rows
            teacher = None if batch.teacher is None else batch.teacher[:, head]
            columns = batch.columns[:, head]
            losses.append(draft_losses(kind, state, teacher, columns, (rows, constants.rows), sampled))
        return weighted_sum(losses, list((batch.columns >= 0).T), kind.weights)

    return loss


def states_of(module: MedusaBlocks, params: Params, batch: Batch) -> list[Float[Array, "n D"]]:
    """One state per head: what is multiplied with output rows."""
    hidden, heads = batch.hidden.astype(jnp.float32), module.config.num_heads
    return cast(list[Array], module.apply({"params": params}, hidden, heads, method="states"))


def build_target_ranks(config: MedusaConfig) -> Callable[[Params, Batch, Constants], Array]:
    """``(params, batch, constants) -> [n, K]`` rank of every target among its head's scores, compiled."""
    module = MedusaBlocks(config)

    @jax.jit
    def target_ranks(params: Params, batch: Batch, constants: Constants) -> Int[Array, "n K"]:
        found = []
        for head, state in enumerate(states_of(module, params, batch)):
            rows = params["output"][head] if config.own_output else constants.rows
            found.append(ranks_of_targets(state, rows, batch.columns[:, head]))
        return jnp.stack(found, axis=1)

    return target_ranks


def rank_examples(
    target_ranks: Callable[[Params, Batch, Constants], Array],
    params: Params,
    examples: Examples,
    chosen: Int[np.ndarray, " m"],
    constants: Constants,
) -> Int[np.ndarray, "m K"]:
    """Ranks of the targets of chosen examples, in passes of one size."""
    padded = np.pad(chosen, (0, -len(chosen) % POSITIONS_PER_PASS))  # the padding's ranks are cut off
    starts = range(0, len(padded), POSITIONS_PER_PASS)
    parts = (read_batch(examples, padded[s : s + POSITIONS_PER_PASS], with_teacher=False) for s in starts)
    return np.concatenate([np.asarray(target_ranks(params, part, constants)) for part in parts])[: len(chosen)]
