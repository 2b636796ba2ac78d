"""Which stored positions teach and which examine: split by prompt, targets as columns of the heads' scores."""

import hashlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.training.data import Records, select
from entmtp_jax.training.draft_vocab import (
    Coverage,
    rank_ids,
    response_tokens,
    smallest_size,
    sweep_coverage,
    to_columns,
)
from entmtp_jax.training.features import Features, draft_targets, response_positions
from entmtp_jax.types import Int

HELD_OUT_EVERY = 20


class DraftVocab(NamedTuple):
    """The ids that the heads score.

    Attributes:
      ids: ``[X]`` int32, most frequent first.
      is_whole: they are the whole vocabulary, so nothing can be missed.
      sweep: coverage of some sizes on the held-out responses.
    """

    ids: np.ndarray
    is_whole: bool
    sweep: list[Coverage]


class Examples(NamedTuple):
    """Stored positions and who may see them.

    Attributes:
      hidden: ``[all, D]`` bfloat16 hidden states, those of prompts too.
      positions: ``[n]`` which of them are examples.
      columns: ``[n, K]`` int32 targets; see ``draft_vocab.to_columns``.
      train: indices of the examples to learn from.
      held_out: indices of the examples to examine with.
    """

    hidden: np.ndarray
    positions: np.ndarray
    columns: np.ndarray
    train: np.ndarray
    held_out: np.ndarray


def held_out_records(records: Records, *, every: int = HELD_OUT_EVERY) -> np.ndarray:
    """``[records]`` True for about one record in ``every``, chosen by a checksum of the prompt.

    Several answers to one prompt lie on the same side, whatever else the set holds.

    Raises:
      UserError: one side would be empty.
    """
    prompts = (records.record(i)[: records.prompt_length[i]] for i in range(records.num_records))
    held = np.asarray([zlib.crc32(prompt.astype("<i4").tobytes()) % every == 0 for prompt in prompts], bool)
    if held.all() or not held.any():
        raise UserError(f"{len(held)} records are too few to hold out one in {every}; add records")
    return held


def choose_draft_vocab(
    records: Records,
    held: np.ndarray,
    *,
    vocab_size: int,
    eos_ids: Sequence[int],
    size: int | None,
    coverage: float | None,
) -> DraftVocab:
    """The most frequent ids of the training responses, EOS first.

    Args:
      records: all records.
      held: from ``held_out_records``; these are not counted.
      vocab_size: V.
      eos_ids: always among the ids.
      size: how many ids; 0 for the whole vocabulary.
      coverage: if ``size`` is None, take as many as cover this share of the held-out tokens.

    Raises:
      UserError: more ids than the vocabulary has, or neither size nor coverage.
    """
    counted = response_tokens(select(records, np.flatnonzero(~held)))
    examined = response_tokens(select(records, np.flatnonzero(held)))
    if counted.max(initial=0) >= vocab_size:
        raise UserError(f"the records hold token {counted.max()}, but the model has {vocab_size}; is it their model?")
    ranked = rank_ids(counted, vocab_size=vocab_size, always=eos_ids)
    num_seen = len(np.union1d(counted, np.asarray(eos_ids, np.int32)))
    if size is None:
        if coverage is None:
            raise UserError("choose the draft vocabulary by its size or by its coverage")
        size = smallest_size(ranked, num_seen, examined, coverage)
    if size > vocab_size:
        raise UserError(f"a draft vocabulary of {size} ids, but the model has {vocab_size}; choose fewer")
    sweep = sweep_coverage(ranked, num_seen, examined)
    return DraftVocab(ids=ranked[: size or vocab_size], is_whole=size in (0, vocab_size), sweep=sweep)


def take_draft_vocab(records: Records, held: np.ndarray, ids: Int[np.ndarray, " X"]) -> DraftVocab:
    """The draft vocabulary of other heads, and how well it covers these records.

    Args:
      records: all records.
      held: from ``held_out_records``.
      ids: most frequent first, a part of the vocabulary.
    """
    examined = response_tokens(select(records, np.flatnonzero(held)))
    others = np.setdiff1d(np.arange(max(examined.max(initial=0), ids.max()) + 1), ids)
    sweep = sweep_coverage(np.concatenate([ids, others]), len(ids), examined)
    return DraftVocab(ids=ids.astype(np.int32), is_whole=False, sweep=sweep)


def make_examples(
    features: Features, records: Records, held: np.ndarray, vocab: DraftVocab, *, num_heads: int
) -> Examples:
    """Stored features as examples for heads over a draft vocabulary.

    Args:
      features: all positions.
      records: what they were computed from.
      held: ``[records]`` which records are held out.
      vocab: the scored ids.
      num_heads: K.
    """
    chosen = response_positions(features, records)
    is_held = held[features.record[chosen]]
    return Examples(
        hidden=features.hidden,
        positions=chosen,
        columns=to_columns(draft_targets(features, records, chosen, num_heads), vocab.ids),
        train=np.flatnonzero(~is_held),
        held_out=np.flatnonzero(is_held),
    )


def records_digest(records: Records) -> str:
    """16 hexadecimal digits that tell sets of records apart."""
    digest = hashlib.sha256()
    for field in records:
        digest.update(np.ascontiguousarray(field).tobytes())
    return digest.hexdigest()[:16]
