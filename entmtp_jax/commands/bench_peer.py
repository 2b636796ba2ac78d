"""Plain decoding against Hugging Face's ``generate`` on the same weights, written as safetensors first."""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from entmtp_jax.assemble import Model, load_draft, make_policy
from entmtp_jax.bank import Bank
from entmtp_jax.checkpoints.llama_names import tensors_from_params
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.generation import compile_decoder, generate
from entmtp_jax.topology import autoregressive

CAPACITY = 512


def write_folder(model: Model, folder: Path) -> None:
    """The model's weights as a Hugging Face folder."""
    config = model.config
    save_file(tensors_from_params(config, jax.tree.map(np.asarray, model.params)), folder / "model.safetensors")
    described = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "eos_token_id": list(config.eos_ids),
        "bos_token_id": config.bos_id,
    }
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")


def compare_with_transformers(
    model: Model, sets: Sequence[Any], cache: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds per new token of both, prompt by prompt in turn, prefill included for both."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp(dir=cache))
    try:
        write_folder(model, folder)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, model.dtype)).eval()
    finally:
        shutil.rmtree(folder)
    draft = load_draft(model, "lookup", None, notify=say)
    bank = Bank("plain", (autoregressive(),))
    policy = make_policy("ar", bank, dtype=model.dtype, batch=1, notify=say)
    params = ModelParams(model.params, draft.params)
    decoder = build_decoder(model.backbone, draft.head, bank, DecodeConfig(capacity=CAPACITY))
    compiled, _ = compile_decoder(decoder, params, policy)
    ours, theirs, equal, prompts = [], [], 0, 0
    for request in (request for prompts_ in sets for request in prompts_.requests):
        began = time.perf_counter()
        done = generate(compiled, params, [request], policy).completions[0].tokens
        ours.append((time.perf_counter() - began) / len(done))
        began = time.perf_counter()
        ids = torch.tensor([request.prompt])
        with torch.inference_mode():
            text = peer.generate(
                ids, max_new_tokens=request.max_new_tokens, do_sample=False, attention_mask=ids * 0 + 1
            )
        written = text[0, len(request.prompt) :].tolist()
        theirs.append((time.perf_counter() - began) / len(written))
        equal, prompts = equal + (written == done), prompts + 1
    # The first prompt warms both up.
    ratios = [b / a for a, b in zip(ours[1:], theirs[1:], strict=True)]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    say(
        f"plain decoding {1 / statistics.median(ours[1:]):.1f} tokens/s, transformers "
        f"{1 / statistics.median(theirs[1:]):.1f}; ratio {middle:.2f} ({low:.2f} .. {high:.2f}); "
        f"equal texts {equal} of {prompts}"
    )
    return {"ratio_quartiles": [float(low), float(middle), float(high)], "equal_texts": equal, "prompts": prompts}
