"""Writes ``trees/published/*.json``: the draft trees that earlier projects published, as banks of one.

    python scripts/make_published_trees.py
    python scripts/make_published_trees.py --out /tmp/published

The trees are figures, restated here as the number of children of each node and written out by the
package's own code. ``R`` is the root, ``03`` the node with path (0, 3), ``4-9:1`` gives each of the nodes
4 to 9 one child; a node that is not listed is a leaf.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from entmtp_jax.assets import assets_folder
from entmtp_jax.bank import bank_of, save_bank
from entmtp_jax.errors import UserError
from entmtp_jax.topology import Topology

MEDUSA = {
    "repository": "https://github.com/FasterDecoding/Medusa",
    "commit": "e2a5d20",
    "file": "medusa/model/medusa_choices.py",
}
EAGLE = {
    "repository": "https://github.com/SafeAILab/EAGLE",
    "commit": "cb7e084",
    "file": "eagle/model/choices.py",
}
LICENCE = "figures only: the shape is restated, no code or text of the repository (Apache-2.0) is copied"

MEDUSA_TREES = {
    "mc_sim_7b_63": "R:10 0:10 1:7 2:3 3:2 4-9:1 00:10 01:3 02:2 03-07:1 10:2 20:1 000:2",
    "vicuna_7b_stage2": ("R:10 0:10 1:5 2:2 3:2 4-7:1 00:9 01:4 02:2 03-05:1 10:3 11:1 20:1 000:4 001:1 002:1 010:1"),
    "vicuna_7b_stage1_ablation": (
        "R:10 0:10 1:4 2:2 3:2 4-6:1 00:10 01:4 02:2 03-05:1 10:3 11:1 20:1 30:1 000:4 001:1 002:1 010:1"
    ),
    "vicuna_7b_stage1": "R:10 0:10 1:7 2:4 3:3 4:2 5:2 6-9:1 00:9 01:3 02:2 03-05:1 10:2 20:1 000:1",
    "vicuna_13b_stage2": (
        "R:10 0:10 1:4 2:2 3-5:1 00:10 01:4 02:2 03-05:1 10:3 11:1 20:1 30:1 000:4 001:2 002:1 010:1 100:1"
    ),
    "vicuna_13b_stage1": "R:10 0:10 1:7 2:4 3:2 4:2 5-8:1 00:10 01:4 02:2 03-05:1 10:2 11:1 20:1 000:1",
    "vicuna_33b_stage2": "R:10 0:10 1:5 2:3 3:2 4-7:1 00:10 01:4 02:2 03-05:1 10:3 11:1 20:1 000:3 001:1 010:1",
    "vicuna_33b_stage1": "R:10 0:10 1:8 2:5 3:3 4:2 5:2 6-9:1 00:9 01:3 02:2 03-04:1 10:2 20:1",
    "zephyr_stage2": "R:10 0:10 1:6 2:4 3:2 4:2 5-7:1 00:10 01:4 02:2 03-05:1 10:2 11:1 20:1 000:2 001:1",
}
EAGLE_TREES = {"eagle1_static_25": "R:4 0:3 1:2 2:2 3:1 00:3 01:2 02:2 10:1 000:3 0000:2"}


def paths_from_child_counts(notation: str) -> list[tuple[int, ...]]:
    """All paths of a tree in the child-count notation; ``R:2 0:1`` is ``[(0,), (1,), (0, 0)]``."""
    paths: list[tuple[int, ...]] = []
    for entry in notation.split():
        nodes, count = entry.split(":")
        if nodes == "R":
            parents = [()]
        else:
            first, _, last = nodes.partition("-")
            *above, low = map(int, first)
            parents = [(*above, rank) for rank in range(low, int((last or first)[-1]) + 1)]
        paths += [(*parent, rank) for parent in parents for rank in range(int(count))]
    return paths


def main(argv: list[str] | None = None) -> int:
    """Writes every published tree and prints one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=assets_folder("trees") / "published", help="folder to write to")
    out = parser.parse_args(argv).out
    try:
        for source, trees in ((MEDUSA, MEDUSA_TREES), (EAGLE, EAGLE_TREES)):
            for name, notation in trees.items():
                topology = Topology.from_paths(name, paths_from_child_counts(notation))
                variable = "mc_sim_7b_63" if source is EAGLE else name
                made_by = source | {
                    "variable": variable,
                    "licence": LICENCE,
                    "script": "scripts/make_published_trees.py",
                }
                path = out / f"{name}.json"
                save_bank(dataclasses.replace(bank_of(topology), made_by=made_by), path)
                print(f"{path}: {topology.num_nodes} nodes, depth {topology.depth}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
