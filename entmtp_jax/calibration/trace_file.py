"""Traces on disk: one ``.npz`` of arrays with a JSON header. ``docs/trace_format.md`` describes every field."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from entmtp_jax.calibration.replay import Trace
from entmtp_jax.calibration.trace import UNRANKED
from entmtp_jax.errors import UserError
from entmtp_jax.json_files import COUNT, OBJECT, TEXT, Key, check_object
from entmtp_jax.training.npz_files import read_npz, write_npz
from entmtp_jax.types import Params

FORMAT = "entmtp trace"
VERSION = 1
MISS = 255  # in the stored ranks: the token is not among the candidates, or the text has ended
MAX_TOP_K = MISS

POSITION_FIELDS = {
    "ranks": np.uint8,
    "chain_logprobs": np.float32,
    "entropy_nats": np.float32,
    "top1_prob": np.float32,
    "outside_loops": np.bool_,
    "agrees": np.bool_,
}
TEXT_FIELDS = {"new_tokens": np.int32, "set": np.str_, "id": np.str_, "finish_reason": np.str_}
HEADER_KEYS = {
    "format": Key(TEXT),
    "version": Key(COUNT),
    "miss": Key(COUNT),
    "model": Key(TEXT),
    "backbone_fingerprint": Key(TEXT),
    "heads": Key(TEXT),
    "head_kind": Key(TEXT),
    "head_fingerprint": Key(TEXT),
    "dtype": Key(TEXT),
    "depth": Key(COUNT),
    "top_k": Key(COUNT),
    "made_by": Key(OBJECT),
}


@dataclasses.dataclass(frozen=True)
class TraceHeader:
    """What was traced.

    Attributes:
      model: the backbone, as it was named.
      backbone_fingerprint: of its weights, see ``checkpoints.fingerprint``.
      heads: as they were named.
      head_kind: ``Head.name``.
      head_fingerprint: of their weights, see ``fingerprint_params``.
      dtype: of the backbone's weights; replay equals decoding for ``float32``.
      depth: K, levels that were looked at.
      top_k: candidates that the head ranked; trees of higher ranks cannot be replayed.
      made_by: command, commit, versions and date.
    """

    model: str
    backbone_fingerprint: str
    heads: str
    head_kind: str
    head_fingerprint: str
    dtype: str
    depth: int
    top_k: int
    made_by: Mapping[str, Any]


class TraceFile(NamedTuple):
    """A trace, and what its texts are.

    Attributes:
      header: what was traced.
      trace: the positions.
      sets: per text, the set that its prompt is from.
      ids: per text, of its prompt.
      finish_reasons: per text, why it ended: ``eos``, ``length`` or ``cache``.
    """

    header: TraceHeader
    trace: Trace
    sets: list[str]
    ids: list[str]
    finish_reasons: list[str]


def save_trace(path: Path, file: TraceFile) -> None:
    """Writes a trace; a reader never sees half of it.

    Raises:
      UserError: the folder cannot be written, or the head ranks too many candidates for the format.
    """
    header = dataclasses.asdict(file.header)
    if file.header.top_k > MAX_TOP_K:
        raise UserError(f"{path}: a trace holds ranks of up to {MAX_TOP_K} candidates; got top-k {file.header.top_k}")
    words = json.dumps({"format": FORMAT, "version": VERSION, "miss": MISS} | header, allow_nan=False)
    ranks = file.trace.ranks
    labels = {"set": file.sets, "id": file.ids, "finish_reason": file.finish_reasons}
    fields = file.trace._asdict() | {"ranks": np.where(ranks < file.header.top_k, ranks, MISS)} | labels
    arrays = {name: np.asarray(fields[name], dtype) for name, dtype in (POSITION_FIELDS | TEXT_FIELDS).items()}
    write_npz(path, {"header": np.frombuffer(words.encode(), np.uint8)} | arrays, compress=True)


def load_trace(path: Path) -> TraceFile:
    """Reads a trace; nothing in the file is executed.

    Raises:
      UserError: no such file, or it is damaged, of another kind or a newer version, or inconsistent.
    """
    header = _read_header(path)
    arrays = read_npz(path, [*POSITION_FIELDS, *TEXT_FIELDS])
    for name, dtype in (POSITION_FIELDS | TEXT_FIELDS).items():
        if not np.issubdtype(arrays[name].dtype, dtype):
            raise _broken(path, f"{name} is {arrays[name].dtype}, not {np.dtype(dtype).name}")
    texts, positions = len(arrays["new_tokens"]), int(np.maximum(arrays["new_tokens"] - 1, 0).sum())
    shapes = {name: (positions,) for name in POSITION_FIELDS} | {name: (texts,) for name in TEXT_FIELDS}
    shapes |= {name: (positions, header.depth) for name in ("ranks", "chain_logprobs")}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise _broken(path, f"{name} has shape {arrays[name].shape}, not {shape}")
    stored = arrays["ranks"].astype(np.int32)
    if ((stored >= header.top_k) & (stored != MISS)).any():
        raise _broken(path, f"ranks of {header.top_k} candidates cannot hold {stored[stored != MISS].max()}")
    fields = {name: arrays[name] for name in Trace._fields} | {"ranks": np.where(stored == MISS, UNRANKED, stored)}
    labels = (arrays[name].tolist() for name in ("set", "id", "finish_reason"))
    return TraceFile(header, Trace(**fields), *labels)


def _read_header(path: Path) -> TraceHeader:
    try:
        header = json.loads(read_npz(path, ["header"])["header"].tobytes().decode())
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise _broken(path, "the header is not JSON") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UserError(f"{path}: an archive of another kind, not a trace; give a file that scripts/trace.py wrote")
    if header.get("version") != VERSION:
        what = f"trace version {header.get('version')}, but this program reads {VERSION}"
        raise UserError(f"{path}: {what}; update entmtp_jax or trace again")
    check_object(header, f"{path}: header", HEADER_KEYS)
    if header["miss"] != MISS or not 1 <= header["top_k"] <= MAX_TOP_K or header["depth"] < 1:
        raise _broken(path, "miss, top_k or depth is out of range")
    return TraceHeader(**{field.name: header[field.name] for field in dataclasses.fields(TraceHeader)})


def _broken(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}; the trace is broken, make it again with scripts/trace.py")


def fingerprint_params(params: Params) -> str:
    """A short sum of a head's weights: 16 hexadecimal digits of a SHA-256.

    Names, shapes and values rounded to bfloat16 count, so it is the same in whatever dtype they were loaded.
    """
    digest = hashlib.sha256()
    for name, leaf in jax.tree_util.tree_leaves_with_path(params):
        values = np.asarray(leaf)
        if np.issubdtype(values.dtype, np.integer):
            values = values.astype(np.int64)
        else:
            values = values.astype(np.float32).astype(ml_dtypes.bfloat16)
        digest.update(f"{jax.tree_util.keystr(name)} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]
