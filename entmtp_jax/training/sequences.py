"""Whole records packed into rows of one length: what heads with a memory of their own are trained on.

Several records share a row; a record sees only itself, and its positions count from 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.training.data import Records
from entmtp_jax.training.draft_vocab import NO_COLUMN, to_columns
from entmtp_jax.training.features import Features, record_starts
from entmtp_jax.types import Array, Float, Int

PADDING = -1


class Rows(NamedTuple):
    """Packed records, on the host.

    Attributes:
      feature: ``[R, L]`` int32 index of the position among the stored features; ``PADDING`` where there is none.
      token: ``[R, L]`` int32.
      column: ``[R, L]`` int32 column of the token in the draft vocabulary; see ``draft_vocab.to_columns``.
      position: ``[R, L]`` int32 place in the record.
      segment: ``[R, L]`` int32 number of the record; ``PADDING`` where there is none.
      example: ``[R, L]`` bool: the position's next token is of a response, and one more follows.
    """

    feature: np.ndarray
    token: np.ndarray
    column: np.ndarray
    position: np.ndarray
    segment: np.ndarray
    example: np.ndarray


class SequenceBatch(NamedTuple):
    """Some rows of packed records, on the device.

    Attributes:
      hidden: ``[R, L, D]`` final normed hidden states, any float type.
      token: ``[R, L]``.
      column: ``[R, L]``.
      position: ``[R, L]``.
      segment: ``[R, L]``.
      base: ``[R, M]`` places from which drafts start, ``PADDING`` where a row has fewer.
    """

    hidden: Float[Array, "R L D"]
    token: Int[Array, "R L"]
    column: Int[Array, "R L"]
    position: Int[Array, "R L"]
    segment: Int[Array, "R L"]
    base: Int[Array, "R M"]


def pack(lengths: Sequence[int], row_length: int, *, seed: int) -> list[list[int]]:
    """Members of every row: records in random order, each into the fullest row that still holds it.

    Example: lengths 3, 3 and 4 in rows of 7: ``[[0, 2], [1]]`` or another packing into two rows.

    Raises:
      UserError: a record is longer than a row.
    """
    if max(lengths, default=0) > row_length:
        raise UserError(f"a record has {max(lengths)} tokens, but a row holds {row_length}; raise --row-length")
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # rows by free places
    for index in np.random.default_rng(seed).permutation(len(lengths)):
        length = int(lengths[index])
        space = min((free for free in open_rows if free >= length), default=None)
        if space is None:
            rows.append([])
            row, space = len(rows) - 1, row_length
        else:
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space]
        rows[row].append(int(index))
        open_rows.setdefault(space - length, []).append(row)
    return rows


def pack_rows(
    features: Features,
    records: Records,
    chosen: Int[np.ndarray, " n"],
    draft_ids: Int[np.ndarray, " X"],
    *,
    row_length: int,
    seed: int,
) -> Rows:
    """The chosen records that have features, packed.

    Args:
      features: hidden states of whole records.
      records: what they were computed from.
      chosen: indices of records.
      draft_ids: the scored ids.
      row_length: L.
      seed: of the packing.

    Raises:
      UserError: none of the chosen records has features, or one does not fit.
    """
    start_of = record_starts(features)
    members = [int(index) for index in chosen if int(index) in start_of]
    if not members:
        raise UserError("no record with stored hidden states is left to use; store more blocks")
    packed = pack(records.lengths[members].tolist(), row_length, seed=seed)
    feature, token, position, segment, first = (np.full((len(packed), row_length), PADDING, np.int32) for _ in range(5))
    for row, places in enumerate(packed):
        at = 0
        for record in (members[place] for place in places):
            length = int(records.lengths[record])
            here = slice(at, at + length)
            feature[row, here] = start_of[record] + np.arange(length)
            token[row, here] = records.record(record)
            position[row, here] = np.arange(length)
            segment[row, here] = record
            first[row, here] = max(int(records.prompt_length[record]) - 1, 0)
            at += length
    two_on = np.pad(segment, ((0, 0), (0, 2)), constant_values=PADDING)[:, 2:]
    example = (segment != PADDING) & (two_on == segment) & (position >= first)
    column = np.where(segment == PADDING, NO_COLUMN, to_columns(token, draft_ids))
    return Rows(feature, np.maximum(token, 0), column, np.maximum(position, 0), segment, example)


def batch_of_rows(
    rows: Rows, hidden: np.ndarray, chosen: Int[np.ndarray, " R"], *, bases: int | None, random: np.random.Generator
) -> SequenceBatch:
    """Some rows, with random places to draft from.

    Args:
      rows: all packed rows.
      hidden: ``[n, D]`` of all stored features.
      chosen: which rows.
      bases: M, places per row, drawn without replacement among the examples; None takes them all.
      random: source of the draw.
    """
    base = np.full((len(chosen), bases or rows.token.shape[1]), PADDING, np.int32)
    for row, index in enumerate(chosen):
        places = np.flatnonzero(rows.example[index])
        if bases is not None and len(places) > bases:
            places = np.sort(random.choice(places, bases, replace=False))
        base[row, : len(places)] = places
    fields = (rows.token, rows.column, rows.position, rows.segment)
    return SequenceBatch(
        jnp.asarray(hidden[np.maximum(rows.feature[chosen], 0)]),
        *(jnp.asarray(field[chosen]) for field in fields),
        base=jnp.asarray(base),
    )


def look_ahead(batch: SequenceBatch, values: Array, base: Int[Array, "R M"], offset: int, missing: int) -> Array:
    """``[R, M]`` values ``offset`` places after each base, ``missing`` where the record has ended."""
    place = jnp.maximum(base, 0) + offset
    inside = jnp.minimum(place, values.shape[1] - 1)
    same = jnp.take_along_axis(batch.segment, inside, axis=1) == jnp.take_along_axis(
        batch.segment, jnp.maximum(base, 0), axis=1
    )
    known = same & (base >= 0) & (place < values.shape[1])
    return jnp.where(known, jnp.take_along_axis(values, inside, axis=1), missing)
