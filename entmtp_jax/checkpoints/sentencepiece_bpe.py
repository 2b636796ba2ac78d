"""SentencePiece BPE tokenizers (Llama 1 and 2, Vicuna, Mistral) from pieces and scores, without the library.

The pieces come from a GGUF file or from a ``tokenizer.model``, a protocol-buffer message of which four
fields are needed; reading them here saves two dependencies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, normalizers

from entmtp_jax.checkpoints.byte_level_bpe import NORMAL, UNKNOWN, add_special_tokens
from entmtp_jax.errors import UserError

SPACE = "\u2581"  # how pieces write a space
UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


class Pieces(NamedTuple):
    """A SentencePiece vocabulary in the order of the ids."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    add_space_prefix: bool


def build_sentencepiece_bpe(pieces: Pieces) -> Tokenizer:
    """Builds the tokenizer; it adds no special tokens.

    SentencePiece joins, again and again, the neighbours whose union has the best score. The ``tokenizers``
    library wants ranked pairs instead: every way to cut a piece into two pieces is a merge, ranked by the
    score of the whole.
    """
    vocabulary = {token: index for index, token in enumerate(pieces.tokens)}
    unknown = next((t for t, kind in zip(pieces.tokens, pieces.types, strict=True) if kind == UNKNOWN), None)
    merges = ranked_merges(pieces)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", SPACE)
    prefix = normalizers.Prepend(SPACE)
    tokenizer.normalizer = normalizers.Sequence([prefix, escape]) if pieces.add_space_prefix else escape
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    add_special_tokens(tokenizer, pieces.tokens, pieces.types)
    return tokenizer


def ranked_merges(pieces: Pieces) -> list[tuple[str, str]]:
    """Every way to cut a piece into two pieces, best score of the whole first, then by the ids of the parts.

    With scores a 0, b 0, c 0, ab -1, bc -2, abc -3 the order is ``(a, b), (b, c), (a, bc), (ab, c)``.
    """
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(pieces.tokens, pieces.types, strict=True))
        if kind == NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ids and second in ids:
                ranked.append((-pieces.scores[index], ids[first], ids[second], first, second))
    ranked.sort()
    return [(first, second) for *_, first, second in ranked]


def read_sentencepiece_model(path: Path) -> Pieces:
    """Reads a ``tokenizer.model``.

    Args:
      path: the file.

    Returns:
      The pieces with their scores and types.

    Raises:
      UserError: damaged, or a kind that the Llama family does not use (unigram, or a text normaliser).
    """
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normaliser: dict[int, int | bytes] = {}
    try:
        for field, value in _fields(path.read_bytes()):
            if field == 1:  # ModelProto.pieces: 1 piece, 2 score, 3 type
                piece = dict(_fields(_message(value)))
                tokens.append(_message(piece[1]).decode("utf-8"))
                scores.append(struct.unpack("<f", _message(piece[2]))[0])
                types.append(int(piece.get(3, NORMAL)))
            elif field == 2:
                trainer = dict(_fields(_message(value)))
            elif field == 3:
                normaliser = dict(_fields(_message(value)))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, TypeError, struct.error):
        raise UserError(f"{path} is damaged or no SentencePiece model; fetch it again") from None
    if not tokens:
        raise UserError(f"{path} is damaged or no SentencePiece model; fetch it again")
    # TrainerSpec.model_type is 3; NormalizerSpec: 2 character map, 3 prefix, 4 remove extra spaces (both default true).
    if trainer.get(3, UNIGRAM) != BPE or normaliser.get(2) or normaliser.get(4, 1):
        raise UserError(f"{path} is not a plain BPE model as the Llama family uses; provide a tokenizer.json instead")
    return Pieces(tokens, scores, types, bool(normaliser.get(3, 1)))


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where bytes were expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and raw value of every field of a protocol-buffer message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == BYTES:
            length, position = _varint(data, position)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"unknown wire type {wire}")
        if position + length > len(data):
            raise ValueError("the message ends within a field")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Reads an integer of 7 bits per byte, lowest first: ``0x96 0x01`` is 22 + 1 * 128 = 150."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
