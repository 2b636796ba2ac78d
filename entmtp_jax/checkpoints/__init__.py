"""Real checkpoints as parameter trees: Hugging Face folders and GGUF files, every tensor accounted for."""

from __future__ import annotations

from pathlib import Path

from entmtp_jax.checkpoints.gguf import load_gguf_config, open_gguf
from entmtp_jax.checkpoints.huggingface import open_huggingface
from entmtp_jax.checkpoints.huggingface_config import load_huggingface_config
from entmtp_jax.checkpoints.huggingface_export import save_backbone
from entmtp_jax.checkpoints.llama_names import TensorSource, params_from_tensors, tensors_from_params
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.types import Params


def load_config(source: Path) -> BackboneConfig:
    """Reads the config of a checkpoint without its weights.

    Args:
      source: a Hugging Face folder or a GGUF file.

    Raises:
      UserError: nothing there, or a model that is not supported.
    """
    _check_exists(source)
    return load_huggingface_config(source) if source.is_dir() else load_gguf_config(source)


def open_checkpoint(source: Path) -> tuple[BackboneConfig, TensorSource]:
    """Reads the config of a checkpoint and where its tensors lie; see ``load_backbone``."""
    _check_exists(source)
    return open_huggingface(source) if source.is_dir() else open_gguf(source)


def load_backbone(source: Path, dtype: str) -> tuple[BackboneConfig, Params]:
    """Loads a backbone's config and weights.

    Args:
      source: a Hugging Face folder or a GGUF file.
      dtype: "float32" or "bfloat16" for the matrices; norm scales are float32 in both.

    Returns:
      The config, and the parameter tree as a nested dict of NumPy arrays with unrolled layers (see
      ``llama_names`` for its places).

    Raises:
      UserError: nothing there, a model that is not supported, a damaged file, or a tensor that does not fit.
    """
    config, tensors = open_checkpoint(source)
    return config, params_from_tensors(config, tensors, dtype)


def _check_exists(source: Path) -> None:
    if not source.exists():
        raise UserError(f"{source} does not exist; pass a Hugging Face folder or a .gguf file")


__all__ = ["load_backbone", "load_config", "open_checkpoint", "save_backbone", "tensors_from_params"]
