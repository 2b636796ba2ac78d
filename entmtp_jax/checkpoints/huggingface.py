"""Loads a Llama-family backbone from a Hugging Face folder: safetensors or torch files, single or sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  safetensors returns bfloat16 arrays only once NumPy knows the dtype
import numpy as np
from safetensors import SafetensorError, safe_open

from entmtp_jax.checkpoints.huggingface_config import load_huggingface_config
from entmtp_jax.checkpoints.llama_names import TensorSource
from entmtp_jax.checkpoints.torch_pickle import read_torch_file, read_torch_tensor
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.json_files import read_json

# In order of preference: safetensors can be read without care, torch files with it.
SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
FLOATS = ("F32", "F16", "BF16")


class Shard(NamedTuple):
    """One file of tensors: shapes at once, data one by one."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def open_huggingface(folder: Path) -> tuple[BackboneConfig, TensorSource]:
    """Reads the config of a Hugging Face folder and the headers of its weight files.

    Args:
      folder: holds config.json and ``model*.safetensors`` or ``pytorch_model*.bin``.

    Returns:
      The config, and the tensors by name.

    Raises:
      UserError: an unsupported family or option, or a missing or damaged file.
    """
    return load_huggingface_config(folder), _source(folder)


def _source(folder: Path) -> TensorSource:
    """All shards as one source."""
    shard_of: dict[str, Shard] = {}
    for path in weight_files(folder):
        shard = _open_safetensors(path) if path.suffix == ".safetensors" else _open_torch(path)
        for name in shard.shapes:
            if name in shard_of:
                raise UserError(f"{folder}: tensor {name!r} is both in {shard_of[name].path.name} and in {path.name}")
            shard_of[name] = shard
    shapes = {name: shard.shapes[name] for name, shard in shard_of.items()}
    return TensorSource(str(folder), shapes, lambda name: shard_of[name].read(name))


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, shards in the order of their names.

    Raises:
      UserError: there are none, or the index names a file that is not there.
    """
    for single in (SAFETENSORS, TORCH):
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _indexed_files(index)
        if (folder / single).is_file():
            return [folder / single]
    raise UserError(f"{folder} has neither {SAFETENSORS} nor {TORCH} nor an index of shards; is it downloaded whole?")


def _indexed_files(index: Path) -> list[Path]:
    """The shards that an index names. Which tensor lies where is read from the shards themselves."""
    data = read_json(index)
    places = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index} has no 'weight_map' from tensors to files; fetch it again")
    paths = [index.parent / name for name in sorted(set(places.values()))]
    for path in paths:
        if path.parent != index.parent or path.suffix not in (".safetensors", ".bin"):
            raise UserError(f"{index} names {path.name!r}, which is no weight file of this folder")
        if not path.is_file():
            raise UserError(f"{index} names {path.name!r}, which is missing; fetch it too")
    return paths


def _open_safetensors(path: Path) -> Shard:
    try:
        file = safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or no safetensors file: {error}") from None
    shapes: dict[str, tuple[int, ...]] = {}
    for name in file.keys():  # noqa: SIM118  a safetensors file is no mapping
        entry = file.get_slice(name)
        if entry.get_dtype() not in FLOATS:
            raise UserError(f"{path}: tensor {name!r} has dtype {entry.get_dtype()}; readable: {', '.join(FLOATS)}")
        shapes[name] = tuple(entry.get_shape())
    return Shard(path, shapes, file.get_tensor)


def _open_torch(path: Path) -> Shard:
    file = read_torch_file(path)
    for name, tensor in file.tensors.items():
        if tensor.storage.dtype.kind == "i":
            raise UserError(f"{path}: tensor {name!r} holds integers; a float type is expected")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return Shard(path, shapes, lambda name: read_torch_tensor(file, name))
