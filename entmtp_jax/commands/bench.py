"""Measures decoding against plain decoding on sets of prompts, interleaved in one process.

    python scripts/bench.py --set gsm8k=gsm8k.jsonl --set humaneval=humaneval.jsonl --json bench.json
    python scripts/bench.py --costs
    python scripts/bench.py --set gsm8k=gsm8k.jsonl --flips --dtype bfloat16
    python scripts/bench.py --set gsm8k=gsm8k.jsonl --transformers

Every contestant runs the same prompts with the same weights: plain decoding (a program of its own, the
best we have), the entropy policy over the bank restricted to so many rows, and single topologies on request.
Compilation is timed apart. --transformers compares plain decoding with Hugging Face's ``generate`` on the
same weights as safetensors (extra ``test``). The last line of standard output is one JSON document.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from entmtp_jax.assets import DEFAULT_MODEL
from entmtp_jax.errors import UserError


def build_parser(prog: str = "bench.py") -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="NAME=FILE.jsonl", help="a set of prompts; may be repeated")
    add("--prompts-per-set", type=int, default=20, metavar="N", help="the first N of each set (%(default)s)")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (%(default)s)")
    add("--repeats", type=int, default=1, help="times that every prompt is decoded by everyone (%(default)s)")
    add("--model", default=DEFAULT_MODEL, help="known name, folder, .gguf file or hub id")
    add("--heads", help="medusa, hydra, mtp, lookup, hybrid or a head folder (default: as for decode.py)")
    add("--bank", metavar="FILE", help="bank of topologies (default: the shipped one)")
    limits = "widest topologies of each entropy contestant (%(default)s)"
    add("--row-limits", type=int, nargs="*", default=[8, 32], metavar="R", help=limits)
    add("--fixed", action="append", default=[], metavar="TOPOLOGY", help="also run one topology alone; repeatable")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights (%(default)s)")
    add("--capacity", type=int, default=512, help="cache slots per row; longer prompts are left out (%(default)s)")
    add("--cache-dir", metavar="D", help="folder of the fetched model and the compiled programs")
    add("--costs", action="store_true", help="only measure what a step of every topology costs here")
    add("--flips", action="store_true", help="only count choices that differ between one-row and 8-row passes")
    add("--transformers", action="store_true", help="only compare plain decoding with transformers")
    add("--json", type=Path, metavar="OUT", help="write the document to a file too")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "bench.py") -> int:
    """Parses, measures, prints tables."""
    arguments = build_parser(prog).parse_args(argv)
    if not arguments.costs and not arguments.set:
        raise UserError("no prompts; give at least one --set NAME=FILE.jsonl, or --costs")
    for entry in arguments.set:
        if "=" not in entry:
            raise UserError(f"--set {entry!r}: write it as NAME=FILE.jsonl")
    from entmtp_jax.commands.bench_run import run

    return run(arguments)
