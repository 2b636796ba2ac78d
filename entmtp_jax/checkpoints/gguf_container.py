"""Reads the container of a GGUF file: metadata and the place of every tensor, nothing decoded yet.

Layout (GGUF version 2 and 3, little-endian): magic, version, number of tensors, number of metadata
pairs; the pairs; per tensor its name, dimensions (innermost first), quantisation type and offset; then,
aligned, the tensors. The reader of the ``gguf`` package builds one array per vocabulary entry and needs
seconds for it; this one needs a tenth of a second, which every start of a script would otherwise pay.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from entmtp_jax.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
KINDS = {member.value: member.name for member in GGMLQuantizationType}
READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

Value: TypeAlias = "int | float | bool | str | list[Value]"


class PackedTensor(NamedTuple):
    """One tensor as it lies in the file.

    Attributes:
      shape: logical shape, outermost dimension first (the reverse of the file's order).
      kind: quantisation type by its GGUF name, such as "Q4_1".
      offset: byte at which the data begin in the file.
      num_bytes: length of the data.
    """

    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


class GGUFFile(NamedTuple):
    """The parsed header of a GGUF file, and all its bytes, mapped read-only."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, PackedTensor]
    data: np.ndarray


class _Cursor:
    """A position in the mapped file; every read moves it and refuses to pass the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def advance(self, num_bytes: int) -> int:
        """Moves on and returns the old position."""
        start = self.position
        if start + num_bytes > len(self.data):
            raise UserError(truncated(self.path))
        self.position = start + num_bytes
        return start

    def scalar(self, layout: str) -> int | float | bool:
        start = self.advance(struct.calcsize(layout))
        return struct.unpack_from(layout, self.data, start)[0]

    def count(self) -> int:
        return int(self.scalar("<Q"))

    def text(self) -> str:
        length = self.count()
        start = self.advance(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def texts(self, length: int) -> list[str]:
        """Many strings in a row: vocabulary and merges, the bulk of a header, hence without the calls of ``text``."""
        data, position, values = self.data, self.position, []
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(length):
            if position + 8 > len(data):
                raise UserError(truncated(self.path))
            start = position + 8
            position = start + unpack(data, position)[0]
            values.append(data[start:position].decode("utf-8", errors="replace"))
        self.position = position
        self.advance(0)  # the last string may pass the end
        return values

    def value(self, kind: int) -> Value:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise UserError(f"{self.path}: metadata type {kind} is unknown; the file is damaged or newer than GGUF 3")
        return self.scalar(SCALARS[kind])

    def array(self) -> list[Value]:
        kind, length = int(self.scalar("<I")), self.count()
        if kind == STRING:
            return list(self.texts(length))
        if kind == ARRAY:
            return [self.array() for _ in range(length)]
        if kind not in SCALARS:
            raise UserError(f"{self.path}: metadata type {kind} is unknown; the file is damaged or newer than GGUF 3")
        dtype = np.dtype(SCALARS[kind])
        start = self.advance(length * dtype.itemsize)
        return np.frombuffer(self.data, dtype, length, start).tolist()


def truncated(path: Path) -> str:
    """The message for a file that ends before its header says so."""
    return f"{path} is truncated or damaged; fetch or convert it again"


def read_gguf(path: Path) -> GGUFFile:
    """Parses the header of a GGUF file.

    Args:
      path: the file.

    Returns:
      Metadata by key and tensors by GGUF name; the tensors' data stay on disk.

    Raises:
      UserError: no GGUF file, another version, truncated, or a quantisation type that cannot be read.
    """
    try:
        with path.open("rb") as handle:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise UserError(f"{path} cannot be read as a GGUF file: {error}") from None
    if data[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path} is not a GGUF file (it does not begin with 'GGUF')")
    cursor = _Cursor(data, path)
    cursor.advance(len(MAGIC))
    version = cursor.scalar("<I")
    if version not in VERSIONS:
        raise UserError(f"{path} has GGUF version {version}; little-endian versions 2 and 3 can be read")
    num_tensors, num_pairs = cursor.count(), cursor.count()
    metadata: dict[str, Value] = {}
    for _ in range(num_pairs):
        key = cursor.text()
        metadata[key] = cursor.value(int(cursor.scalar("<I")))
    tensors = _read_places(cursor, num_tensors, metadata.get("general.alignment", 32))
    return GGUFFile(path, metadata, tensors, np.frombuffer(data, np.uint8))


def _read_places(cursor: _Cursor, num_tensors: int, alignment: Value) -> dict[str, PackedTensor]:
    """The table of tensors, offsets made absolute and checked against the length of the file."""
    if not isinstance(alignment, int) or alignment < 1:
        raise UserError(truncated(cursor.path))
    rows: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name = cursor.text()
        dims = tuple(cursor.count() for _ in range(int(cursor.scalar("<I"))))
        rows.append((name, dims[::-1], int(cursor.scalar("<I")), cursor.count()))
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, PackedTensor] = {}
    for name, shape, kind, offset in rows:
        kind_name, num_bytes = _kind_and_size(cursor.path, name, shape, kind)
        if name in tensors or start + offset + num_bytes > len(cursor.data):
            raise UserError(truncated(cursor.path))
        tensors[name] = PackedTensor(shape, kind_name, start + offset, num_bytes)
    return tensors


def _kind_and_size(path: Path, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    """Quantisation type by name, and bytes of the tensor: rows of whole blocks."""
    kind_name = KINDS.get(kind, str(kind))
    if kind_name not in READABLE:
        raise UserError(f"{path}: tensor {name!r} has type {kind_name}; readable types: {', '.join(READABLE)}")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    size = math.prod(shape)
    if not shape or shape[-1] % block:
        raise UserError(f"{path}: tensor {name!r} of shape {shape} is not made of whole {kind_name} blocks of {block}")
    return kind_name, size // block * block_bytes


def read_tensor(file: GGUFFile, name: str) -> np.ndarray:
    """Decodes one tensor to float32.

    Args:
      file: from ``read_gguf``.
      name: GGUF name of the tensor.

    Returns:
      float32 array of the logical shape (read-only where the file holds float32).
    """
    packed = file.tensors[name]
    data = file.data[packed.offset : packed.offset + packed.num_bytes]
    if packed.kind == "F32":
        return data.view("<f4").reshape(packed.shape)
    if packed.kind == "F16":
        return data.view("<f2").astype(np.float32).reshape(packed.shape)
    kind = GGMLQuantizationType[packed.kind]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    # Blocks are independent, so rows may be joined; ``dequantize`` works on 16 rows at a time, and rows
    # of about 4,096 values keep its temporaries in the cache without paying its overhead per row.
    blocks_per_row = math.gcd(packed.num_bytes // block_bytes, max(1, 4096 // block))
    with np.errstate(all="ignore"):  # a damaged file may hold scales that are not finite
        return dequantize(data.reshape(-1, blocks_per_row * block_bytes), kind).reshape(packed.shape)
