"""Writes text with a language model; ``python scripts/decode.py --help`` lists the flags."""

import sys

from entmtp_jax.cli import run_main
from entmtp_jax.commands.decode import main

if __name__ == "__main__":
    sys.exit(run_main(main))
