"""Lets the backbone answer prompts, as training data for heads that draft for it.

    python scripts/distill.py --prompts prompts.jsonl --out runs/answers
    python scripts/distill.py --prompts more.jsonl.gz --out runs/answers --max-new-tokens 256 --batch-size 32

Each line of the JSONL has at least id and prompt. Every finished batch is one shard of token ids in --out.
Killed at any moment and started again, it goes on and ends with the same answers; further prompt files may
be answered into the same folder. Heads, bank, policy and batch size change only how fast that goes.
scripts/train.py reads the folder as --data.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from entmtp_jax.assets import DEFAULT_MODEL


def build_parser(prog: str = "distill.py") -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="known name, hub id, Hugging Face folder or .gguf file (%(default)s)")
    add("--prompts", type=Path, required=True, help="JSONL file, plain or .gz")
    add("--out", type=Path, required=True, help="folder of the shards")
    add("--system", help="system message (whatever the chat template says)")
    add("--no-chat", action="store_true", help="give the prompts as they are, without the chat template")
    add("--max-prompt-tokens", type=int, default=256, metavar="N", help="leave out longer prompts (%(default)s)")
    add("--max-new-tokens", type=int, default=192, metavar="N", help="cut answers there (%(default)s)")
    add("--batch-size", type=int, default=8, metavar="B", help="prompts answered together (%(default)s)")
    add("--heads", help="what drafts, as for decode.py (hybrid where heads are shipped for the model, else lookup)")
    add("--bank", metavar="FILE", help="bank of topologies: a file or a name below trees/")
    policy = "entropy, fixed:<topology> or ar (ar on a CPU, which the rows of a batch fill already; else entropy)"
    add("--policy", help=policy)
    add("--cache-dir", help="folder of the fetched model and the compiled programs")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "distill.py") -> int:
    """Parses, answers what is not answered yet and prints how much that was."""
    args = build_parser(prog).parse_args(argv)
    from entmtp_jax.commands.distill_run import run  # the imports take seconds

    return run(args)
