"""Writes the card and the training-curve picture of heads from the files of their finished training run.

    python scripts/head_card.py runs/mtp
    python scripts/head_card.py runs/mtp --out models/smollm2-135m-instruct/heads/mtp

Reads run.json, log.jsonl and head/ of the run; no figure is typed by hand. Without --out the card goes to head/card.md
and the picture to curve.png of the run. With --out, a folder that the heads were copied to, the card goes there and the
picture to ../../curves/NAME.png beside the heads, so that a folder of heads stays four files; the card links to it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path


def build_parser(prog: str = "head_card.py") -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_DIR", help="folder of a finished training run")
    add("--out", type=Path, metavar="HEAD_DIR", help="folder that the run's heads were copied to (RUN_DIR/head)")
    add("--curve", type=Path, metavar="FILE.png", help="where the picture goes (see above)")
    add("--note", type=Path, metavar="FILE.md", help="Markdown that is added to the card as its notes")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "head_card.py") -> int:
    """Parses, writes both files and prints their paths."""
    args = build_parser(prog).parse_args(argv)
    from entmtp_jax.commands.head_card_run import run  # the imports take seconds

    return run(args)
