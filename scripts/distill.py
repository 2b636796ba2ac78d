"""Lets the backbone answer prompts, as training data for heads that draft for it.

    python scripts/distill.py --prompts prompts.jsonl --out runs/answers
    python scripts/distill.py --prompts more.jsonl.gz --out runs/answers --max-new-tokens 256 --batch-size 32

Each line of the JSONL has at least id and prompt. Every finished batch is one shard of token ids in --out.
Killed at any moment and started again, it goes on and ends with the same answers; further prompt files may
be answered into the same folder. scripts/train.py reads it as --data.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

from entmtp_jax.backbone.transformer import build_backbone
from entmtp_jax.checkpoints import load_backbone
from entmtp_jax.cli import run_main
from entmtp_jax.errors import UserError
from entmtp_jax.hub import DEFAULT_MODEL, cache_folder, enable_compile_cache, fingerprint, resolve_model
from entmtp_jax.prompts import Prompt, read_prompts
from entmtp_jax.text import Text, load_text
from entmtp_jax.training.distill import DistillConfig, Question, distill


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="known name, hub id, Hugging Face folder or .gguf file (%(default)s)")
    add("--prompts", type=Path, required=True, help="JSONL file, plain or .gz")
    add("--out", type=Path, required=True, help="folder of the shards")
    add("--system", help="system message (whatever the chat template says)")
    add("--no-chat", action="store_true", help="give the prompts as they are, without the chat template")
    add("--max-prompt-tokens", type=int, default=256, metavar="N", help="leave out longer prompts (%(default)s)")
    add("--max-new-tokens", type=int, default=192, metavar="N", help="cut answers there (%(default)s)")
    add("--batch-size", type=int, default=16, metavar="B", help="prompts answered together (%(default)s)")
    add("--cache-dir", help="folder of the fetched model and the compiled programs")
    return parser


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


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    args = build_parser().parse_args(argv)
    return run_main(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
