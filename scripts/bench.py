"""Measures decoding against plain decoding; ``python scripts/bench.py --help`` lists the flags."""

import sys

from entmtp_jax.cli import run_main
from entmtp_jax.commands.bench import main

if __name__ == "__main__":
    sys.exit(run_main(main))
