"""Compares drafting heads on the same texts: sizes, cost of drafting, accuracy by depth, tokens per step.

    python scripts/trace.py --heads medusa --set gsm8k=gsm8k.jsonl --prompts-per-set 40 --out medusa.npz
    python scripts/trace.py --heads mtp --set gsm8k=gsm8k.jsonl --prompts-per-set 40 --out mtp.npz
    python scripts/compare.py medusa.npz mtp.npz --json compare.json

Tokens per step come from the traces, by replay; only the cost of drafting is measured, on this device. Trees that
are deeper than a head drafts are left out of its rows. The tables are Markdown; the last line of standard output
is one JSON document.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

DEFAULT_BANK = "comparison"


def build_parser(prog: str = "compare.py") -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("traces", nargs="+", type=Path, metavar="TRACE.npz", help="one per head, of the same sets of prompts")
    add("--bank", default=DEFAULT_BANK, metavar="FILE", help="topologies to replay (%(default)s)")
    add("--cost-topology", default="tree15", metavar="NAME", help="where drafting is timed (%(default)s)")
    add("--no-costs", action="store_true", help="replay only; no model is loaded")
    add("--cache-dir", metavar="D", help="folder of the fetched model and the compiled programs")
    add("--json", type=Path, metavar="OUT", help="write the document to a file too")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "compare.py") -> int:
    """Parses, replays, measures, prints tables."""
    args = build_parser(prog).parse_args(argv)
    from entmtp_jax.commands.compare_run import run  # the imports take seconds

    return run(args)
