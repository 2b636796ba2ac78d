"""Traces heads along the backbone's own texts; ``python scripts/trace.py --help`` lists the flags."""

import sys

from entmtp_jax.cli import run_main
from entmtp_jax.commands.trace import main

if __name__ == "__main__":
    sys.exit(run_main(main))
