"""Records of token ids: what ``distill`` writes and training reads.

A set of records is one ``.npz`` file or a folder of them (shards, read in name order). Each file holds
``tokens`` (all records end to end), ``offsets`` (record i is ``tokens[offsets[i]:offsets[i + 1]]``) and
``prompt_length`` (the first so many tokens of a record are the prompt, on which there is no loss).
Files are read without executing pickled objects.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.training.npz_files import read_npz, write_npz
from entmtp_jax.types import Bool, Int

REQUIRED = ("tokens", "offsets", "prompt_length")
MAX_ID = np.iinfo(np.int32).max


class Records(NamedTuple):
    """Token sequences end to end.

    Attributes:
      tokens: ``[sum of lengths]`` int32.
      offsets: ``[records + 1]`` int64.
      prompt_length: ``[records]`` int32.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_length: np.ndarray

    @property
    def num_records(self) -> int:
        """How many records there are."""
        return len(self.prompt_length)

    @property
    def lengths(self) -> np.ndarray:
        """``[records]`` tokens of each record, prompt included."""
        return np.diff(self.offsets)

    def record(self, index: int) -> np.ndarray:
        """Token ids of one record."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def usable(records: Records) -> Bool[np.ndarray, " records"]:
    """Which records have a token to draft: the second of a response, as the backbone itself writes the first.

    Example: a prompt of 3 tokens needs 2 more; without a prompt the first token of all stands for it.
    """
    return records.lengths >= np.maximum(records.prompt_length, 1) + 2


def check_usable(
    records: Records, held: Bool[np.ndarray, " records"], stored: Int[np.ndarray, " n"] | None = None
) -> None:
    """Refuses a set in which there is nothing to learn from or nothing to examine with.

    Args:
      records: all of them.
      held: which are held out.
      stored: indices of those whose hidden states are used; None for all.

    Raises:
      UserError: no usable record on one side.
    """
    chosen = np.ones(len(held), bool) if stored is None else np.isin(np.arange(len(held)), stored)
    for side, words in ((~held, "to learn from"), (held, "held out")):
        if not (usable(records) & side & chosen).any():
            raise UserError(
                f"none of the {int((side & chosen).sum())} training records {words} has a token to draft: a response "
                "needs two tokens or more; add records with scripts/distill.py, or use more of the stored blocks"
            )


def check_vocabulary(records: Records, vocab_size: int, *, where: str, model: str) -> None:
    """Refuses records of another tokenizer, as far as their ids show it.

    Raises:
      UserError: names the first record with an id that the model does not have.
    """
    beyond = np.flatnonzero(records.tokens >= vocab_size)
    if len(beyond):
        record = int(np.searchsorted(records.offsets, beyond[0], side="right")) - 1
        raise UserError(
            f"{where}: record {record} holds token {records.tokens[beyond[0]]}, but {model} has ids 0 to "
            f"{vocab_size - 1}; give the model that these records were written by"
        )


def load_records(path: Path) -> Records:
    """Reads a file or a folder of shards.

    Raises:
      UserError: the path does not exist, holds no shard, or a shard is broken or inconsistent.
    """
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: no .npz shard in this folder; write some with scripts/distill.py")
    return concatenate([_load_file(file) for file in files])


def concatenate(parts: list[Records]) -> Records:
    """One set of records from several."""
    starts = np.cumsum([0] + [len(part.tokens) for part in parts])
    offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts[:-1], strict=True)]
    return Records(
        tokens=np.concatenate([part.tokens for part in parts]),
        offsets=np.concatenate([*offsets, starts[-1:]]).astype(np.int64),
        prompt_length=np.concatenate([part.prompt_length for part in parts]),
    )


def from_sequences(sequences: list[list[int]], prompt_lengths: list[int]) -> Records:
    """Records from Python lists of token ids."""
    lengths = [len(sequence) for sequence in sequences]
    return Records(
        tokens=np.asarray([token for sequence in sequences for token in sequence], np.int32),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        prompt_length=np.asarray(prompt_lengths, np.int32),
    )


def select(records: Records, indices: np.ndarray) -> Records:
    """The records at ``indices``, in that order."""
    return from_sequences(
        [records.record(i).tolist() for i in indices], [int(records.prompt_length[i]) for i in indices]
    )


def save_records(path: Path, records: Records, *, ids: Sequence[str] = ()) -> None:
    """Writes one shard; a reader never sees half of it.

    Args:
      path: of the shard; a name ending in ``.npz``.
      records: token sequences.
      ids: of the prompts, one per record, or none.
    """
    arrays = records._asdict() | ({"ids": np.asarray(ids, np.str_)} if ids else {})
    write_npz(path, arrays, compress=True)


def read_ids(path: Path) -> list[str]:
    """Ids of the prompts in one shard; none if it does not tell.

    Raises:
      UserError: the shard is broken.
    """
    arrays = read_npz(path)
    return arrays["ids"].tolist() if "ids" in arrays else []


def _load_file(path: Path) -> Records:
    arrays = read_npz(path, REQUIRED)
    for name in REQUIRED:
        if arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu":
            raise UserError(f"{path}: {name} must be a list of integers; write it again with scripts/distill.py")
    outside = (arrays["tokens"] < 0) | (arrays["tokens"] > MAX_ID)
    if outside.any():
        raise UserError(f"{path}: {arrays['tokens'][outside][0]} is no token id; write it again")
    records = Records(
        tokens=arrays["tokens"].astype(np.int32),
        offsets=arrays["offsets"].astype(np.int64),
        prompt_length=arrays["prompt_length"].astype(np.int32),
    )
    ends = records.offsets
    consistent = len(ends) == records.num_records + 1 and ends[0] == 0 and ends[-1] == len(records.tokens)
    if not consistent or (np.diff(ends) < records.prompt_length).any() or (records.prompt_length < 0).any():
        raise UserError(f"{path}: offsets, prompt_length and tokens do not fit together; write it again")
    return records
