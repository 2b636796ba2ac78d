"""Writes a backbone as a Hugging Face folder, which ``open_huggingface`` and transformers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from entmtp_jax.backbone.transformer import unstack_layers
from entmtp_jax.checkpoints.huggingface import SAFETENSORS
from entmtp_jax.checkpoints.llama_names import TensorSource, check_account, tensors_from_params
from entmtp_jax.config import BackboneConfig
from entmtp_jax.json_files import write_json
from entmtp_jax.types import Params
from entmtp_jax.whole_files import replacing

# The families that differ in nothing but the biases of query, key and value.
FAMILIES = {False: ("llama", "LlamaForCausalLM"), True: ("qwen2", "Qwen2ForCausalLM")}


def save_backbone(folder: Path, config: BackboneConfig, params: Params) -> None:
    """Writes ``model.safetensors`` and ``config.json``; the tokenizer is not part of it.

    What concerns running alone, ``scan_layers`` and ``taps``, is not stored.

    Args:
      folder: made if need be.
      config: shape of the backbone.
      params: its parameters, layers unrolled or scanned as the config says; dtypes are kept.

    Raises:
      UserError: parameters of another shape than the config's, or a folder that cannot be written.
    """
    if config.scan_layers:
        params = unstack_layers(params, config.num_layers)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors_from_params(config, params).items()}
    shapes = {name: value.shape for name, value in tensors.items()}
    check_account(config, TensorSource("the parameters", shapes, tensors.__getitem__))
    with replacing(folder / SAFETENSORS) as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt"})  # transformers wants to be told the row-major layout
    write_json(folder / "config.json", describe_config(config))


def describe_config(config: BackboneConfig) -> dict[str, Any]:
    """What config.json says of a backbone: the inverse of ``load_huggingface_config``."""
    family, architecture = FAMILIES[config.qkv_bias]
    return {
        "model_type": family,
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": _describe_scaling(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        # Null says that there is none; where a key is missing transformers assumes the family's own ids.
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }


def _describe_scaling(config: BackboneConfig) -> dict[str, Any] | None:
    """``rope_scaling`` beside ``rope_theta``: the older of two spellings, which old and new readers know."""
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return None
    described = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return described
    return described | {
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
