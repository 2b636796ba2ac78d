"""Tells checkpoints apart cheaply, so that heads can say which weights they were trained on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from entmtp_jax.checkpoints import open_checkpoint
from entmtp_jax.checkpoints.llama_names import FINAL_NORM, check_account, layer_name


def fingerprint(source: Path) -> str:
    """A short sum of a checkpoint's shape and of a sample of its weights.

    The sample is the final norm and the value projections of three layers, as the model sees them and
    rounded to bfloat16: the same weights in another file format or dtype have the same fingerprint,
    quantised or fine-tuned ones another.

    Args:
      source: a Hugging Face folder or a GGUF file.

    Returns:
      16 hexadecimal digits of a SHA-256.

    Raises:
      UserError: the checkpoint cannot be read.
    """
    config, tensors = open_checkpoint(source)
    check_account(config, tensors)
    shape = {key: getattr(config, key) for key in ("vocab_size", "hidden_size", "num_layers", "num_heads")}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    layers = sorted({0, config.num_layers // 2, config.num_layers - 1})
    for name in [FINAL_NORM, *(layer_name(layer, "self_attn.v_proj.weight") for layer in layers)]:
        values = tensors.read(name).astype(np.float32).astype(ml_dtypes.bfloat16)
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]
