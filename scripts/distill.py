"""Lets the backbone answer prompts; ``python scripts/distill.py --help`` lists the flags."""

import sys

from entmtp_jax.cli import run_main
from entmtp_jax.commands.distill import main

if __name__ == "__main__":
    sys.exit(run_main(main))
