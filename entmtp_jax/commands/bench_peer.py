"""Plain decoding against Hugging Face's ``generate`` on the same weights, written as safetensors first."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from entmtp_jax.assemble import Model, load_draft, make_policy
from entmtp_jax.bank import Bank
from entmtp_jax.checkpoints import save_backbone
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.generation import compile_decoder, generate
from entmtp_jax.topology import autoregressive

CAPACITY = 512


def compare_with_transformers(
    model: Model, sets: Sequence[Any], cache: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds per new token of both, prompt by prompt in turn, prefill included for both."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp(dir=cache))
    try:
        save_backbone(folder, model.config, model.params)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, model.dtype)).eval()
        peer = cast(Any, loaded)  # its declared type has no generate
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
