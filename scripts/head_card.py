"""Writes the card of trained heads; ``python scripts/head_card.py --help`` lists the flags."""

import sys

from entmtp_jax.cli import run_main
from entmtp_jax.commands.head_card import main

if __name__ == "__main__":
    sys.exit(run_main(main))
