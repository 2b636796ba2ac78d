"""How good heads are on held-out positions: where the true token stands among each head's candidates."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.training.draft_vocab import NO_COLUMN
from entmtp_jax.training.examples import Examples
from entmtp_jax.training.medusa import Batch, build_scores
from entmtp_jax.types import Array, Float, Int, Params

CHUNK = 1024  # positions per pass
NOT_RANKED = np.iinfo(np.int32).max  # behind every candidate, however few ids are scored


class Accuracies(NamedTuple):
    """How good heads are.

    Attributes:
      top1: per head, the share of the existing targets that are the head's first candidate.
      top5: among its first five.
      top10: among its first ten.
      greedy_chain: mean drafts kept of the chain of all heads' first candidates.
    """

    top1: list[float]
    top5: list[float]
    top10: list[float]
    greedy_chain: float


def build_target_ranks(config: MedusaConfig) -> Callable[[Params, Batch, Array], Array]:
    """``(params, batch, rows) -> [n, K]`` rank of every target among its head's scores, compiled.

    Rank 0 is the head's first candidate; equal scores rank by column, as ``jax.lax.top_k`` does. A target
    that is not scored has rank ``NOT_RANKED``.
    """
    scores = build_scores(config)

    @jax.jit
    def target_ranks(params: Params, batch: Batch, rows: Float[Array, "X D"]) -> Int[Array, "n K"]:
        ranks = []
        for logits, target in zip(scores(params, batch.hidden, rows), batch.columns.T, strict=True):
            column = jnp.maximum(target, 0)[:, None]
            true = jnp.take_along_axis(logits, column, axis=1)
            before = (logits > true) | ((logits == true) & (jnp.arange(logits.shape[1]) < column))
            ranks.append(jnp.where(target >= 0, before.sum(axis=1), NOT_RANKED))
        return jnp.stack(ranks, axis=1)

    return target_ranks


def evaluate(
    target_ranks: Callable[[Params, Batch, Array], Array],
    params: Params,
    examples: Examples,
    chosen: Int[np.ndarray, " m"],
    rows: Float[Array, "X D"],
) -> Accuracies:
    """Accuracies on chosen examples; a token outside the draft vocabulary counts as wrong.

    Args:
      target_ranks: from ``build_target_ranks``.
      params: of ``MedusaBlocks``.
      examples: stored positions and their targets.
      chosen: indices of the examples to use.
      rows: output rows of the scored ids.
    """
    count = len(chosen)
    padded = np.pad(chosen, (0, -count % CHUNK))  # one compiled shape; the padding's ranks are cut off
    parts = [padded[start : start + CHUNK] for start in range(0, len(padded), CHUNK)]
    ranks = [np.asarray(target_ranks(params, examples.batch(part), rows)) for part in parts]
    return accuracies(np.concatenate(ranks)[:count], examples.columns[chosen] != NO_COLUMN)


def accuracies(ranks: np.ndarray, exists: np.ndarray) -> Accuracies:
    """Accuracies from the ranks of the targets.

    Example: two positions, two heads, ranks ``[[0, 0], [0, 3]]``, all targets exist: top-1 is ``[1.0, 0.5]``,
    top-5 ``[1.0, 1.0]``, and the greedy chain keeps 2 and 1 drafts, 1.5 on average.

    Args:
      ranks: ``[n, K]``.
      exists: ``[n, K]`` False past the end of a text.
    """
    present = np.maximum(exists.sum(axis=0), 1)
    top1, top5, top10 = ((((ranks < k) & exists).sum(axis=0) / present).tolist() for k in (1, 5, 10))
    kept = np.cumprod((ranks == 0) & exists, axis=1).sum(axis=1)
    return Accuracies(top1, top5, top10, greedy_chain=float(kept.mean()) if len(kept) else 0.0)
