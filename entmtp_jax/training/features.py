"""Hidden states of a frozen backbone over records, computed once and kept on disk.

Training heads on a frozen backbone needs only its final hidden states, so the backbone runs once over the
data, not once per epoch. Prompts are stored with the responses: a head with a memory of its own reads them.
Blocks of batches are written to their own files; a killed run goes on at the first missing block.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from entmtp_jax.backbone.attention import causal_mask
from entmtp_jax.backbone.cache import init_cache
from entmtp_jax.backbone.transformer import Backbone
from entmtp_jax.errors import UserError
from entmtp_jax.training.data import Records
from entmtp_jax.training.json_lines import append_json_line, read_json_lines
from entmtp_jax.training.npz_files import read_npz, write_npz
from entmtp_jax.training.settings import check_settings
from entmtp_jax.types import Array, Float, Int, Params

LENGTH_STEP = 64  # records are padded to a multiple, so that few programs are compiled
BATCH_TOKENS = 2048
BATCHES_PER_BLOCK = 4
NO_TARGET = -1
HEADER_FILE, PACE_FILE = "features.json", "seconds.jsonl"


class Features(NamedTuple):
    """What a frozen backbone makes of whole records, position by position.

    Attributes:
      hidden: ``[n, D]`` bfloat16 final normed hidden states.
      record: ``[n]`` int32 index of the record that the position belongs to.
      position: ``[n]`` int32 place in that record, 0-based; a record's positions are consecutive and complete.
    """

    hidden: np.ndarray
    record: np.ndarray
    position: np.ndarray


def record_starts(features: Features) -> dict[int, int]:
    """Where each record begins among the features, by its index."""
    starts = np.flatnonzero(features.position == 0)
    return dict(zip(features.record[starts].tolist(), starts.tolist(), strict=True))


def response_positions(features: Features, records: Records) -> Int[np.ndarray, " m"]:
    """Indices of the positions whose own next token is of the response and that have one more token after it.

    Example: a record of 6 tokens, 2 of them the prompt: positions 1, 2 and 3; at position 4 there is nothing
    left to draft.
    """
    first = np.maximum(records.prompt_length[features.record] - 1, 0)
    return np.flatnonzero((features.position >= first) & (features.position < records.lengths[features.record] - 2))


def draft_targets(
    features: Features, records: Records, positions: Int[np.ndarray, " m"], num_heads: int
) -> Int[np.ndarray, "m K"]:
    """int32 tokens at t+2 .. t+1+K of the positions at these indices; ``NO_TARGET`` past the end of the record."""
    record = features.record[positions]
    place = features.position[positions][:, None] + 2 + np.arange(num_heads)
    inside = place < records.lengths[record][:, None]
    index = np.where(inside, records.offsets[record][:, None] + place, 0)
    return np.where(inside, records.tokens[index], NO_TARGET).astype(np.int32)


def plan_batches(records: Records, *, seed: int, batch_tokens: int) -> list[np.ndarray]:
    """Groups records of similar length into batches, in a shuffled order that depends on the seed only.

    Args:
      records: to be grouped.
      seed: of the order.
      batch_tokens: places of a batch, padding included.
    """
    padded = -(-records.lengths // LENGTH_STEP) * LENGTH_STEP
    batches = []
    for length in np.unique(padded):
        members = np.flatnonzero(padded == length)
        size = max(1, batch_tokens // int(length))
        batches += [members[i : i + size] for i in range(0, len(members), size)]
    order = np.random.default_rng(seed).permutation(len(batches))
    return [batches[i] for i in order]


def build_text_pass(backbone: Backbone) -> Callable[[Params, Array], tuple[Array, Array]]:
    """``(params, tokens[B, T]) -> (normed, hidden)[B, T, D]`` float32 of whole texts, compiled."""

    @jax.jit
    def text_pass(params: Params, tokens: Int[Array, "B T"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        batch, length = tokens.shape
        cache = init_cache(backbone.config, batch=batch, slots=1, dtype=jnp.float32)
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        out = backbone.forward(params, tokens, positions, causal_mask(length), cache, jnp.zeros(batch, jnp.int32))
        return out.normed.astype(jnp.float32), out.hidden.astype(jnp.float32)

    return text_pass


def extract_features(
    backbone: Backbone,
    params: Params,
    records: Records,
    folder: Path,
    *,
    seed: int,
    fingerprint: str,
    progress: Callable[[int, int], None],
    max_blocks: int | None = None,
) -> None:
    """Writes the features of the records to ``folder``; blocks that are already there are kept.

    Args:
      backbone: the frozen backbone.
      params: its parameters.
      records: token sequences.
      folder: where the blocks go.
      seed: order of the batches.
      fingerprint: says which weights and records these are; a folder made from others is refused.
      progress: called with (blocks done, blocks in all).
      max_blocks: stop after so many blocks, a random part of the records; None for all.

    Raises:
      UserError: the folder holds features of other weights or records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_settings(
        folder / HEADER_FILE,
        {"fingerprint": fingerprint, "whole_records": True, "seed": seed, "records": records.num_records},
    )

    run = build_text_pass(backbone)
    batches = plan_batches(records, seed=seed, batch_tokens=BATCH_TOKENS)
    blocks = [batches[i : i + BATCHES_PER_BLOCK] for i in range(0, len(batches), BATCHES_PER_BLOCK)][:max_blocks]
    for index, block in enumerate(blocks):
        file = _block_file(folder, index)
        if not file.exists():
            began = time.perf_counter()
            parts = [_batch_features(run, params, records, batch) for batch in block]
            features = Features(*(np.concatenate(field) for field in zip(*parts, strict=True)))
            spent = round(time.perf_counter() - began, 3)
            _save_block(file, features)
            append_json_line(folder / PACE_FILE, {"block": index, "positions": len(features.record), "seconds": spent})
        progress(index + 1, len(blocks))


def backbone_pace(folder: Path) -> float | None:
    """Positions per second of the backbone's pass over the records, compilation included; None if nobody measured it.

    Example: blocks of 600 positions in 2 s and 400 in 3 s: 200 per second.
    """
    lines = [line for line in read_json_lines(folder / PACE_FILE) if {"positions", "seconds"} <= line.keys()]
    seconds = sum(line["seconds"] for line in lines)
    return sum(line["positions"] for line in lines) / seconds if seconds else None


def load_features(folder: Path, max_blocks: int | None = None) -> Features:
    """The first blocks of a folder, or all of them, as arrays in memory; block by block, so nothing is there twice.

    Raises:
      UserError: there are no blocks, or one is damaged.
    """
    files = sorted(folder.glob("block_*.npz"))[:max_blocks]
    if not files:
        raise UserError(f"{folder}: no feature blocks here; run scripts/train.py again to make them")
    starts = np.cumsum([0] + [len(read_npz(file, ["record"])["record"]) for file in files])
    first = _load_block(files[0])
    features = Features(*(np.empty((starts[-1], *field.shape[1:]), field.dtype) for field in first))
    for file, start, end in zip(files, starts[:-1], starts[1:], strict=True):
        for whole, part in zip(features, _load_block(file), strict=True):
            whole[start:end] = part
    return features


def _batch_features(
    run: Callable[[Params, Array], tuple[Array, Array]], params: Params, records: Records, batch: np.ndarray
) -> Features:
    length = int(-(-records.lengths[batch].max() // LENGTH_STEP) * LENGTH_STEP)
    size = max(1, BATCH_TOKENS // length)  # short last batches are padded, not compiled anew
    tokens = np.zeros((size, length), np.int32)
    for row, index in enumerate(batch):
        tokens[row, : records.lengths[index]] = records.record(index)
    hidden = np.asarray(run(params, jnp.asarray(tokens))[0].astype(jnp.bfloat16))
    lengths = records.lengths[batch]
    return Features(
        hidden=np.concatenate([row[:count] for row, count in zip(hidden, lengths, strict=False)]),
        record=np.repeat(batch, lengths).astype(np.int32),
        position=np.concatenate([np.arange(count, dtype=np.int32) for count in lengths]),
    )


def _block_file(folder: Path, index: int) -> Path:
    return folder / f"block_{index:05d}.npz"


def _save_block(file: Path, features: Features) -> None:
    # bfloat16 is not a NumPy type on disk; its bits are.
    write_npz(file, features._asdict() | {"hidden": features.hidden.view(np.uint16)}, compress=False)


def _load_block(file: Path) -> Features:
    arrays = read_npz(file, Features._fields)
    return Features(**arrays | {"hidden": arrays["hidden"].view(ml_dtypes.bfloat16)})
