r"""Grows a bank of topologies for trained heads, measures what they cost here, and fits its entropy thresholds.

    python scripts/calibrate.py --trace traces/medusa.npz --heads runs/medusa/head \
        --out trees/smollm2-135m-instruct/medusa/general.json

Path counts and entropies come from a trace of these heads, made by scripts/trace.py of held-out records or of
prompts. The topologies grow greedily on them, for calm and for unsure text apart; steps are timed on this
device; and the thresholds are those with the most expected tokens per second by replay. Topologies hold on any
device; costs and thresholds are stored for this one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from entmtp_jax.assets import DEFAULT_MODEL
from entmtp_jax.errors import UserError


def build_parser(prog: str = "calibrate.py") -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE.npz", help="of these heads, from scripts/trace.py")
    add("--heads", required=True, help="head folder, or a kind shipped for the model")
    add("--model", default=DEFAULT_MODEL, help="the backbone (%(default)s)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights (%(default)s)")
    add("--rows", type=int, nargs="+", default=[4, 8], help="for each, a tree for calm and one for unsure text")
    add("--pooled-rows", type=int, nargs="*", default=[32], help="for each, one tree for all text (%(default)s)")
    add("--top-k", type=int, default=10, help="ranks that a tree may use (%(default)s)")
    add("--capacity", type=int, default=512, help="cache slots while steps are timed (%(default)s)")
    add("--name", default="general", help="of the bank (%(default)s)")
    add("--out", type=Path, required=True, metavar="FILE.json", help="where the bank goes")
    add("--cache-dir", metavar="D", help="folder of the fetched model and the compiled programs")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "calibrate.py") -> int:
    """Parses, grows, measures, fits, saves."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = build_parser(prog).parse_args(arguments)
    if min([*args.rows, *args.pooled_rows]) < 2:
        raise UserError(f"a tree has at least 2 rows; got {min([*args.rows, *args.pooled_rows])}")
    from entmtp_jax.commands.calibrate_run import run  # the imports take seconds

    return run(args, arguments)
