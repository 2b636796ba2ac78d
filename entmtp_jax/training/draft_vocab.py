"""The ids that draft heads score: the most frequent ones of the training responses, EOS always among them.

Drafting with the whole vocabulary can cost as much as a layer of the backbone. A token outside the draft
vocabulary is a *miss*: no head can propose it, so it counts as wrong in every accuracy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.training.data import Records

SWEEP = (1024, 2048, 4096, 8192, 16384, 32768)
NO_COLUMN = -1  # there is no such token: the record ends before
MISS = -2  # the token is not in the draft vocabulary


class Coverage(NamedTuple):
    """Share of the held-out response tokens that a draft vocabulary of ``size`` ids holds."""

    size: int
    share: float


def response_tokens(records: Records) -> np.ndarray:
    """Tokens of all records without their prompts, end to end."""
    places = np.arange(len(records.tokens)) - np.repeat(records.offsets[:-1], records.lengths)
    return records.tokens[places >= np.repeat(records.prompt_length, records.lengths)]


def rank_ids(tokens: np.ndarray, *, vocab_size: int, always: Sequence[int]) -> np.ndarray:
    """All ids of the vocabulary from the most to the least frequent.

    Args:
      tokens: the text to count, int32.
      vocab_size: V.
      always: ids that stand before all others, such as EOS.

    Returns:
      ``[V]`` int32; equally frequent ids in ascending order.
    """
    counts = np.bincount(tokens, minlength=vocab_size)
    counts[list(always)] = len(tokens) + 1
    return np.argsort(-counts, kind="stable").astype(np.int32)


def sweep_coverage(ranked: np.ndarray, num_seen: int, held_out: np.ndarray) -> list[Coverage]:
    """Coverage of some sizes, up to all ids that occur in the training responses.

    Args:
      ranked: from ``rank_ids``.
      num_seen: how many of them occur in the training responses.
      held_out: ``[n]`` tokens of other records.
    """
    shares = _coverage_by_size(ranked, held_out)
    sizes = [size for size in SWEEP if size < num_seen] + [num_seen]
    return [Coverage(size, float(shares[size])) for size in sizes]


def smallest_size(ranked: np.ndarray, num_seen: int, held_out: np.ndarray, coverage: float) -> int:
    """The smallest size that covers ``coverage`` of the held-out tokens, or all seen ids if none does.

    Example: ids ranked ``7 3 5``, held-out text ``7 7 3 5``, coverage 0.75: one id covers 0.5, two cover
    0.75, so the size is 2.

    Raises:
      UserError: ``coverage`` is no share.
    """
    if not 0 < coverage <= 1:
        raise UserError(f"draft coverage must lie in (0, 1]; got {coverage}")
    shares = _coverage_by_size(ranked, held_out)
    return min(int(np.searchsorted(shares, coverage)), num_seen)


def to_columns(targets: np.ndarray, draft_ids: np.ndarray) -> np.ndarray:
    """Token ids as columns of the heads' scores.

    Example: draft ids ``[7, 3]``, targets ``[3, 7, 4, -1]`` -> ``[1, 0, MISS, NO_COLUMN]``.

    Args:
      targets: ``[n, K]`` int32, negative where there is no token.
      draft_ids: ``[X]`` int32 id of every column.

    Returns:
      ``[n, K]`` int32.
    """
    columns = np.full(max(targets.max(initial=0), draft_ids.max()) + 1, MISS, np.int32)
    columns[draft_ids] = np.arange(len(draft_ids))
    return np.where(targets < 0, NO_COLUMN, columns[np.maximum(targets, 0)]).astype(np.int32)


def _coverage_by_size(ranked: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """``[V + 1]`` share of the held-out tokens among the first 0, 1, 2, ... ranked ids."""
    counts = np.bincount(held_out, minlength=len(ranked))[ranked]
    return np.concatenate([[0], np.cumsum(counts)]) / max(len(held_out), 1)
