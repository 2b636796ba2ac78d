"""Trains draft heads for a frozen backbone on the backbone's own answers.

    python scripts/distill.py --prompts prompts.jsonl --out runs/answers
    python scripts/train.py --heads mtp --data runs/answers --out runs/mtp --epochs 4

The backbone runs once over the data and its hidden states stay on disk (--features); then only the heads
are trained. Killed at any moment and started again with the same command, it goes on and ends with the
same heads; --start trains finished heads further, on other data. The run's folder gets log.jsonl, the
checkpoints and, at the end, head/ (config.json, heads.safetensors, provenance.json), which
scripts/decode.py takes as --heads. Without a terminal every log line is also printed as JSON.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from entmtp_jax.assets import DEFAULT_MODEL

HEADS = ("medusa", "hydra", "hydra++", "mtp")


def build_parser(prog: str = "train.py") -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="known name, folder, .gguf file or hub id (%(default)s)")
    add("--data", type=Path, nargs="+", required=True, help="record files or folders of shards, from distill.py")
    add("--out", type=Path, required=True, help="folder of this run")
    add("--features", type=Path, help="folder of the stored hidden states (OUT/features); may serve several runs")
    add("--feature-blocks", type=int, metavar="N", help="use only N blocks, a random part of the data (all)")
    add("--cache-dir", help="folder of the fetched model and the compiled programs")
    _add_heads(parser.add_argument_group("heads"))
    _add_loss(parser.add_argument_group("loss"))
    _add_run(parser.add_argument_group("run"))
    return parser


def _count_or_folder(text: str) -> int | Path:
    return int(text) if text.isdecimal() else Path(text)


def _add_heads(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--heads", choices=HEADS, default="medusa", help="kind (%(default)s)")
    add("--num-heads", type=int, metavar="K", help="tokens that are guessed ahead (4; mtp: up to 7)")
    add("--num-layers", type=int, help="medusa: residual blocks per head (1); hydra: layers of its MLPs (4)")
    add("--num-modules", type=int, default=1, help="mtp: 1 module applied again and again, or up to K (%(default)s)")
    start = "begin with the parameters of these heads, trained before with the same flags (fresh ones)"
    add("--start", type=Path, metavar="DIR", help=start)
    add("--own-output", action="store_true", help="medusa: give each head an output matrix of its own")
    vocab = group.add_mutually_exclusive_group()
    ids = "ids that the heads score: how many, 0 for all, or a folder of heads for the same ids as theirs"
    vocab.add_argument("--draft-vocab", type=_count_or_folder, metavar="N|DIR", help=ids)
    share = "or: as many ids as cover this share of the held-out tokens (%(default)s)"
    vocab.add_argument("--draft-coverage", type=float, metavar="SHARE", default=0.95, help=share)


def _add_loss(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    teacher = "share of the divergence from the backbone's distribution; the rest is cross-entropy (%(default)s)"
    add("--teacher", type=float, default=0.0, metavar="SHARE", help=teacher)
    add("--depth-decay", type=float, default=0.8, metavar="B", help="depth i weighs B to the i (%(default)s)")
    add("--train-depth", type=int, metavar="K", help="hydra, mtp: levels that are unrolled in training (all)")
    add("--bases", type=int, metavar="M", help="hydra, mtp: places per row from which drafts are unrolled (all)")
    rare = "estimate the softmax from the 1,024 most frequent ids and M others per pass; 0: full (%(default)s)"
    add("--sampled-rare", type=int, default=0, metavar="M", help=rare)


def _add_run(group: argparse._ArgumentGroup) -> None:
    length = group.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="updates")
    length.add_argument("--epochs", type=float, default=4.0, help="or: passes over the data (%(default)s)")
    add = group.add_argument
    add("--batch", type=int, help="medusa: positions per pass (2048); hydra, mtp: packed rows (8)")
    add("--row-length", type=int, default=512, metavar="L", help="hydra, mtp: tokens of a packed row (%(default)s)")
    add("--accumulate", type=int, default=1, metavar="N", help="passes per update (%(default)s)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (%(default)s)")
    add("--weight-decay", type=float, default=0.0, help="of AdamW (%(default)s)")
    dtype = "of the matrix products; parameters and sums stay float32 (%(default)s)"
    add("--compute-dtype", choices=("float32", "bfloat16"), default="float32", help=dtype)
    add("--seed", type=int, default=0, help="of the order of the data and of what is drawn (%(default)s)")
    add("--log-every", type=int, default=10, help="updates between log lines (%(default)s)")
    add("--eval-every", type=int, default=200, help="updates between held-out evaluations; 0: at the end only")
    add("--checkpoint-every", type=int, default=50, help="updates between checkpoints (%(default)s)")


def main(argv: Sequence[str] | None = None, *, prog: str = "train.py") -> int:
    """Parses, trains, writes the heads and prints how good they are."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = build_parser(prog).parse_args(arguments)
    from entmtp_jax.commands.train_run import run  # the imports take seconds

    return run(args, arguments)
