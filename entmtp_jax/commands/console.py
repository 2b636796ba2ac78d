"""The ``entmtp`` command: picks a subcommand, imports that alone, and gives it the rest of the line."""

import importlib
import sys
from collections.abc import Sequence

from entmtp_jax.cli import run_main
from entmtp_jax.errors import UserError

# Each is a module of this package; its own --help says more.
COMMANDS = {
    "decode": "write text with a model, several tokens per step",
    "bench": "measure decoding against plain decoding on sets of prompts",
    "trace": "trace heads along the backbone's own texts, and replay decoding from that",
    "calibrate": "grow a bank of topologies for heads and fit its entropy thresholds",
    "train": "train draft heads on the backbone's own answers",
    "distill": "let the backbone answer prompts, as training data",
    "compare": "compare traced heads: sizes, cost of drafting, tokens per step",
    "head_card": "write the card and the training curve of trained heads",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that the first argument names; ``argv`` defaults to the process's arguments.

    Raises:
      UserError: there is no such subcommand.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print("usage: entmtp COMMAND ...\n\n" + "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items()))
        print("\n'entmtp COMMAND --help' lists the flags of a command.")
        return 0
    if name not in COMMANDS:
        raise UserError(f"{f'unknown command {name!r}' if name else 'no command'}; give one of {', '.join(COMMANDS)}")
    command = importlib.import_module(f"entmtp_jax.commands.{name}")
    return command.main(rest, prog=f"entmtp {name}")


def run() -> int:
    """What the installed command calls; returns the exit code."""
    return run_main(main)
