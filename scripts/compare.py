"""Compares drafting heads on the same texts; ``python scripts/compare.py --help`` lists the flags."""

import sys

from entmtp_jax.cli import run_main
from entmtp_jax.commands.compare import main

if __name__ == "__main__":
    sys.exit(run_main(main))
