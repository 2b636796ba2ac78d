"""How good heads are on held-out positions: where the true token stands among each head's candidates."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.precision import linear_highest
from entmtp_jax.types import Array, Float, Int

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


def ranks_of_targets(
    state: Float[Array, "*n D"], rows: Float[Array, "X D"], columns: Int[Array, "*n"]
) -> Int[Array, "*n"]:
    """Rank of every target among a head's scores: 0 is its first candidate, equal scores rank by column.

    Args:
      state: of the head; its products with the rows are the scores.
      rows: output rows of the scored ids.
      columns: targets; a negative one is not scored and gets ``NOT_RANKED``.
    """
    scores = linear_highest(state, rows)
    column = jnp.maximum(columns, 0)[..., None]
    true = jnp.take_along_axis(scores, column, axis=-1)
    before = (scores > true) | ((scores == true) & (jnp.arange(scores.shape[-1]) < column))
    return jnp.where(columns >= 0, before.sum(axis=-1), NOT_RANKED)


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
