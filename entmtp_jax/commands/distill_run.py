"""The distill command's work: prompts in, shards of answers out."""

import argparse
import hashlib
import json
import sys

import jax
import jax.numpy as jnp
from tqdm import tqdm

from entmtp_jax.backbone.transformer import build_backbone
from entmtp_jax.checkpoints import load_backbone
from entmtp_jax.checkpoints.fingerprint import fingerprint
from entmtp_jax.errors import UserError
from entmtp_jax.hub import cache_folder, enable_compile_cache, resolve_model
from entmtp_jax.prompts import Prompt, read_prompts
from entmtp_jax.text import Text, load_text
from entmtp_jax.training.distill import DistillConfig, Question, distill


def ask(args: argparse.Namespace, text: Text, prompts: list[Prompt]) -> list[Question]:
    """The prompts as token ids, without those that are too long.

    Raises:
      UserError: none is left.
    """
    if args.no_chat:
        questions = [Question(prompt.id, text.encode(prompt.prompt)) for prompt in prompts]
    else:
        questions = [Question(prompt.id, text.chat(prompt.prompt, args.system)) for prompt in prompts]
    kept = [question for question in questions if len(question.tokens) <= args.max_prompt_tokens]
    if not kept:
        raise UserError(f"{args.prompts}: all prompts are longer than {args.max_prompt_tokens} tokens; allow more")
    return kept


def run(args: argparse.Namespace) -> int:
    """Answers what is not answered yet and prints how much that was."""
    prompts = read_prompts(args.prompts)
    cache = cache_folder(args.cache_dir)
    enable_compile_cache(cache)
    source = resolve_model(args.model, cache, lambda line: tqdm.write(line, file=sys.stderr))
    text = load_text(source)
    questions = ask(args, text, prompts)
    config, params = load_backbone(source, "float32")
    eos_ids = tuple(sorted({*config.eos_ids, *text.eos_ids}))
    settings = {
        "fingerprint": fingerprint(source),
        "template": None if args.no_chat else hashlib.sha256((text.template or "").encode()).hexdigest()[:16],
        "system": args.system,
    }
    with tqdm(desc="answers", unit="prompt", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if bar.disable:
                print(json.dumps({"answered": done, "of": total}), flush=True)

        new = distill(
            build_backbone(config),
            jax.tree.map(jnp.asarray, params),
            questions,
            args.out,
            DistillConfig(eos_ids=eos_ids, max_new_tokens=args.max_new_tokens, batch=args.batch_size),
            settings=settings,
            progress=progress,
        )
    print(json.dumps({"answered_now": new, "answered": len(questions), "too_long": len(prompts) - len(questions)}))
    return 0
