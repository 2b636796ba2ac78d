"""The tiny model as a Hugging Face folder, so that scripts can be run on it."""

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from entmtp_jax.checkpoints import tensors_from_params
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone

EOS = 60


def write_tiny_model(folder: Path) -> Path:
    """Writes weights, config and a tokenizer of the words w0 .. w60; w60 ends a text. There is no chat template."""
    folder.mkdir(parents=True)
    _, params = tiny_backbone()
    arrays = jax.tree.map(np.asarray, params)
    save_file(tensors_from_params(TINY_CONFIG, arrays), folder / "model.safetensors")
    c = TINY_CONFIG
    config = {
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": c.tie_embeddings,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(c.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"w{EOS}"}))
    return folder
