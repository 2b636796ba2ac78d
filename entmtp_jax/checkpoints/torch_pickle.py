"""Reads tensors from ``torch.save`` files without executing anything in them and without torch.

Such a file is a zip archive: ``data.pkl`` describes the tensors (storage, offset, shape, strides) and
``data/<key>`` holds the bytes of each storage. A pickle names the functions to be called when it is
loaded, which is how a checkpoint runs foreign code. Here the only names that resolve are those a plain
dict of tensors needs, and they resolve to inert stand-ins without attributes; any other name is refused.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from entmtp_jax.errors import UserError

LEGACY_ADVICE = "open it in an environment that you trust with torch and save it again as safetensors"
# What pickle, zipfile and zlib raise on bytes that are not what they should be.
DAMAGED = (pickle.PickleError, zlib.error, AttributeError, EOFError, LookupError, TypeError, ValueError, RuntimeError)


class StorageKind(NamedTuple):
    """Element type of a storage."""

    dtype: np.dtype


class Storage(NamedTuple):
    """A run of elements in the archive, under ``data/<key>``."""

    key: str
    dtype: np.dtype
    num_elements: int


class StoredTensor(NamedTuple):
    """A view of a storage; offset and strides count elements, as in torch."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _RebuildTensor:
    """Stands for ``torch._utils._rebuild_tensor_v2``."""

    # Without slots a pickle could set attributes on the stand-in.
    __slots__ = ()

    def __call__(
        self, storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
    ) -> StoredTensor:
        return StoredTensor(storage, offset, tuple(shape), tuple(strides))


class _RebuildParameter:
    """Stands for ``torch._utils._rebuild_parameter``: a tensor with a flag for its gradient."""

    __slots__ = ()

    def __call__(self, tensor: StoredTensor, *_: object) -> StoredTensor:
        return tensor


ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "FloatStorage"): StorageKind(np.dtype("<f4")),
    ("torch", "HalfStorage"): StorageKind(np.dtype("<f2")),
    ("torch", "BFloat16Storage"): StorageKind(np.dtype(ml_dtypes.bfloat16)),
    ("torch", "LongStorage"): StorageKind(np.dtype("<i8")),
}


class _TensorUnpickler(pickle.Unpickler):
    """Resolves the names in ``ALLOWED`` and no other."""

    def __init__(self, data: IO[bytes], path: Path) -> None:
        super().__init__(data)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            asked = f"{module}.{name}"
            raise UserError(
                f"{self.path} asks for {asked!r} when it is loaded, which a file of tensors does not need; "
                "it was not executed. Use a safetensors version of this checkpoint"
            )
        return ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Storage:
        _, kind, key, _, num_elements = pid
        if not isinstance(kind, StorageKind):
            raise pickle.UnpicklingError("a storage of no known type")
        return Storage(str(key), kind.dtype, int(num_elements))


class TorchFile(NamedTuple):
    """The parsed index of a ``torch.save`` file.

    Attributes:
      path: the file.
      prefix: folder inside the archive.
      tensors: every tensor of the dict by its name.
    """

    path: Path
    prefix: str
    tensors: dict[str, StoredTensor]


def read_torch_file(path: Path) -> TorchFile:
    """Reads the index of a ``torch.save`` file that holds a flat dict of tensors.

    Args:
      path: the file, as ``pytorch_model.bin``.

    Returns:
      The index; the tensors' data stay on disk.

    Raises:
      UserError: not such a file, the format from before torch 1.6, damaged, or it names something to call.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            prefix = _prefix(archive, path)
            with archive.open(f"{prefix}/data.pkl") as data:
                content = _TensorUnpickler(data, path).load()
    except zipfile.BadZipFile:
        raise UserError(f"{path} is damaged or in the format from before torch 1.6; {LEGACY_ADVICE}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UserError:  # a ValueError too, but it already says what is wrong
        raise
    except DAMAGED as error:
        raise UserError(f"{path} is damaged: its index cannot be read ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a dict of tensors")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise UserError(f"{path}: entry {name!r} is not a tensor; a flat dict of tensors is expected")
        _check_bounds(path, name, value)
    return TorchFile(path, prefix, dict(content))


def _prefix(archive: zipfile.ZipFile, path: Path) -> str:
    """The one folder of the archive; its name is that of the file when it was saved."""
    indices = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(indices) != 1:
        raise UserError(f"{path} is a zip archive, but not one written by torch.save")
    prefix = indices[0].removesuffix("/data.pkl")
    order = f"{prefix}/byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise UserError(f"{path} was written on a big-endian machine; {LEGACY_ADVICE}")
    return prefix


def _check_bounds(path: Path, name: str, tensor: StoredTensor) -> None:
    """No view may reach outside its storage, since its bytes are addressed without further checks."""
    integers = (tensor.offset, *tensor.shape, *tensor.strides)
    sane = (
        isinstance(tensor.storage, Storage)
        and len(tensor.shape) == len(tensor.strides)
        and all(isinstance(value, int) and value >= 0 for value in integers)
    )
    if not sane or (0 not in tensor.shape and _end(tensor) > tensor.storage.num_elements):
        raise UserError(f"{path} is damaged: tensor {name!r} reaches outside its storage")


def _end(tensor: StoredTensor) -> int:
    """One past the last element of the storage that the view touches.

    A ``[2, 3]`` view at offset 4 with strides (1, 2) touches 4 + 1*1 + 2*2 = 9 last, so its end is 10.
    """
    steps = zip(tensor.shape, tensor.strides, strict=True)
    return tensor.offset + sum((size - 1) * stride for size, stride in steps) + 1


def read_torch_tensor(file: TorchFile, name: str) -> np.ndarray:
    """Reads one tensor.

    Args:
      file: from ``read_torch_file``.
      name: its name.

    Returns:
      A read-only array of the stored dtype.

    Raises:
      UserError: the storage is missing or shorter than the index says.
    """
    tensor = file.tensors[name]
    storage, size = tensor.storage, tensor.storage.dtype.itemsize
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, storage.dtype)
    start, end = tensor.offset, _end(tensor)
    try:
        with zipfile.ZipFile(file.path) as archive, archive.open(f"{file.prefix}/data/{storage.key}") as data:
            data.seek(start * size)
            values = np.frombuffer(data.read((end - start) * size), storage.dtype)
    except (OSError, zipfile.BadZipFile, *DAMAGED) as error:
        raise UserError(f"{file.path} is damaged: tensor {name!r} cannot be read ({error}); fetch it again") from None
    if len(values) < end - start:
        raise UserError(f"{file.path} is damaged: tensor {name!r} is shorter than its shape; fetch it again")
    strides = tuple(stride * size for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False)
