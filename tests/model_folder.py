"""The tiny model as a Hugging Face folder, so that scripts can be run on it."""

import dataclasses
import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from entmtp_jax.checkpoints import save_backbone
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone

EOS = 60


def write_tiny_model(folder: Path) -> Path:
    """Writes weights, config and a tokenizer of the words w0 .. w60; w60 ends a text. There is no chat template."""
    _, params = tiny_backbone()
    save_backbone(folder, dataclasses.replace(TINY_CONFIG, eos_ids=(EOS,)), params)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(TINY_CONFIG.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"w{EOS}"}))
    return folder
