"""Traces what heads would have drafted along the backbone's own texts, and replays decoding from that.

    python scripts/trace.py --heads medusa --set gsm8k=gsm8k.jsonl --set code=humaneval.jsonl --out traces/medusa.npz
    python scripts/trace.py --heads medusa mtp lookup --set gsm8k=gsm8k.jsonl --out "traces/{heads}.npz"
    python scripts/trace.py --heads runs/mtp/head --data runs/answers --out traces/mtp.npz
    python scripts/trace.py --replay traces/medusa.npz --bank smollm2-135m-instruct/medusa/general

Prompts are decoded plainly first, through the chat template; of --data, which scripts/distill.py wrote, the
held-out records are taken. At every position the trace holds the ranks of the true tokens among what the head
offers along the true path, and the scheduler's signals (docs/trace_format.md). With --replay no model is
loaded: it gives the figures of every topology of a bank and of its policy, in and outside repetition loops,
equal to float32 decoding of one prompt at a time. The last line of standard output is one JSON document.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from entmtp_jax.assets import DEFAULT_MODEL
from entmtp_jax.errors import UserError

COUNTS = ("prompts_per_set", "max_new_tokens", "capacity", "batch_size", "top_k")
PLACEHOLDER = "{heads}"  # in --out
MAX_TOP_K = 255  # ranks are stored in one byte


def build_parser(prog: str = "trace.py") -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="NAME=FILE.jsonl", help="a set of prompts; may be repeated")
    add("--skip", type=int, default=0, metavar="N", help="leave out the first N of each set (%(default)s)")
    add("--prompts-per-set", type=int, default=20, metavar="N", help="the first N after those (%(default)s)")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (%(default)s)")
    add("--data", type=Path, help="records of answers, instead of prompts; their held-out ones are traced")
    add("--model", default=DEFAULT_MODEL, help="known name, folder, .gguf file or hub id")
    kinds = "medusa, hydra, mtp, lookup, hybrid or a head folder; several are run along the same texts"
    add("--heads", nargs="+", metavar="HEADS", help=kinds)
    add("--top-k", type=int, default=10, metavar="R", help="ranks that trained heads are asked for (%(default)s)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights (%(default)s)")
    add("--capacity", type=int, default=512, help="cache slots per row; longer prompts are left out (%(default)s)")
    add("--batch-size", type=int, default=16, metavar="B", help="prompts decoded together (%(default)s)")
    add("--out", type=Path, metavar="FILE.npz", help="where the trace goes; {heads} stands for the heads' name")
    add("--cache-dir", metavar="D", help="folder of the fetched model and the compiled programs")
    add("--replay", type=Path, metavar="FILE.npz", help="replay a trace instead of making one")
    add("--bank", metavar="FILE", help="bank of topologies to replay")
    add("--time-policies", type=int, default=0, metavar="N", help="with --replay: also time N policies drawn at random")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "trace.py") -> int:
    """Parses, then traces and saves, or replays."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = build_parser(prog).parse_args(arguments)
    if args.replay is not None:
        if args.bank is None:
            raise UserError("--replay needs --bank FILE, whose topologies are replayed")
        from entmtp_jax.commands.trace_replay import run as replay

        return replay(args)
    _check(args)
    from entmtp_jax.commands.trace_run import run  # the imports take seconds

    return run(args, arguments)


def trace_file(out: Path, heads: str) -> Path:
    """Where the trace of these heads goes.

    Example: ``traces/{heads}.npz`` is ``traces/mtp.npz`` for the heads ``mtp`` and ``models/x/heads/mtp``.
    """
    return out.with_name(out.name.replace(PLACEHOLDER, Path(heads).name))


def _check(args: argparse.Namespace) -> None:
    if not args.heads:
        raise UserError("no --heads to trace; give medusa, hydra, mtp, lookup, hybrid or a head folder")
    if args.out is None:
        raise UserError("no --out FILE.npz for the trace; give one, or --replay FILE.npz to read one")
    if len({trace_file(args.out, heads) for heads in args.heads}) < len(args.heads):
        raise UserError(f"--out {args.out}: several heads need a file each; write {PLACEHOLDER} into the name")
    if bool(args.set) == (args.data is not None):
        raise UserError("give prompts by --set NAME=FILE.jsonl, or answers by --data FOLDER, and not both")
    names = [entry.partition("=")[0] for entry in args.set]
    for entry, name in zip(args.set, names, strict=True):
        if "=" not in entry or not name:
            raise UserError(f"--set {entry!r}: write it as NAME=FILE.jsonl")
        if names.count(name) > 1:
            raise UserError(f"--set {entry!r}: there are two sets of this name; give each its own")
    for name in COUNTS:
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(args, name)}")
    if args.top_k > MAX_TOP_K:
        raise UserError(f"--top-k must be at most {MAX_TOP_K}; got {args.top_k}")
    if args.skip < 0:
        raise UserError(f"--skip must be 0 or more; got {args.skip}")
