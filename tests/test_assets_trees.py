"""Every file under ``trees/``: it validates, round-trips, and says where it comes from."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from entmtp_jax import assets
from entmtp_jax.assets import assets_folder
from entmtp_jax.bank import find_bank, load_bank, published_banks, save_bank
from entmtp_jax.topology import Topology

TREES = assets_folder("trees")
FILES = sorted(TREES.rglob("*.json"))
SCRIPT = Path(__file__).parents[1] / "scripts" / "make_published_trees.py"

# Nodes at depth 1, 2, ... as counted in the released lists.
DEPTH_COUNTS = {
    "mc_sim_7b_63": (10, 28, 23, 2),
    "vicuna_7b_stage2": (10, 23, 23, 7),
    "vicuna_7b_stage1_ablation": (10, 21, 25, 7),
    "vicuna_7b_stage1": (10, 32, 20, 1),
    "vicuna_13b_stage2": (10, 19, 25, 9),
    "vicuna_13b_stage1": (10, 29, 23, 1),
    "vicuna_33b_stage2": (10, 24, 24, 5),
    "vicuna_33b_stage1": (10, 34, 19),
    "zephyr_stage2": (10, 27, 23, 3),
    "eagle1_static_25": (4, 8, 8, 3, 2),
}


def published(name: str) -> Topology:
    (topology,) = load_bank(find_bank(name)).topologies
    return topology


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(TREES).as_posix())
def test_every_bank_validates_and_round_trips(path, tmp_path):
    bank = load_bank(path)
    save_bank(bank, tmp_path / path.name)
    assert json.loads((tmp_path / path.name).read_text()) == json.loads(path.read_text())
    assert bank.made_by, "a shipped bank says how it was made"
    for topology in bank.topologies:
        assert len(topology.describe().splitlines()) == topology.num_rows + 1


def test_the_folder_holds_nothing_else():
    assert {path.suffix for path in TREES.rglob("*") if path.is_file()} == {".json", ".md"}
    assert set(published_banks()) == set(DEPTH_COUNTS)


@pytest.mark.parametrize("name", DEPTH_COUNTS)
def test_published_trees_have_the_published_shape(name):
    bank = load_bank(TREES / "published" / f"{name}.json")
    assert bank.name == name and [topology.name for topology in bank.topologies] == [name]
    assert {"repository", "commit", "licence"} <= set(bank.made_by)
    assert tuple(np.bincount(published(name).depths)) == (1, *DEPTH_COUNTS[name])


def test_mc_sim_7b_63_matches_medusas_buffers():
    topology = published("mc_sim_7b_63")
    assert topology.num_rows == 64
    assert topology.self_mask.sum() == 207
    assert topology.paths.shape == (42, 5)
    assert topology.paths[:3].tolist() == [[0, 1, 11, 39, 63], [0, 1, 11, 39, 62], [0, 3, 28, 61, -1]]
    path_depths = (topology.paths > 0).sum(axis=1).tolist()
    assert path_depths == [4] * 2 + [3] * 22 + [2] * 18
    assert (topology.depth, topology.max_rank) == (4, 9)


def test_the_script_writes_the_published_files(tmp_path, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(["--out", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(DEPTH_COUNTS)
    for path in (TREES / "published").iterdir():
        assert (tmp_path / path.name).read_text() == path.read_text()
    assert len(list(tmp_path.iterdir())) == len(DEPTH_COUNTS)


def test_the_script_reports_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert runpy.run_path(str(SCRIPT))["main"](["--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("error: cannot write")


def test_the_child_count_notation():
    paths_of = runpy.run_path(str(SCRIPT))["paths_from_child_counts"]
    assert paths_of("R:2 0:1") == [(0,), (1,), (0, 0)]
    assert paths_of("R:3 1-2:1 10:2") == [(0,), (1,), (2,), (1, 0), (2, 0), (1, 0, 0), (1, 0, 1)]


def test_the_readme_table_is_that_of_the_files():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| ([\d/]+) \|", (TREES / "README.md").read_text(), re.MULTILINE)
    expected = [
        (name, str(sum(counts)), str(len(counts)), "/".join(map(str, counts))) for name, counts in DEPTH_COUNTS.items()
    ]
    assert rows == expected


def test_the_readme_example_is_a_valid_bank(tmp_path):
    (example,) = re.findall(r"```json\n(.*?)```", (TREES / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.json").write_text(example)
    (fit,) = load_bank(tmp_path / "example.json").calibrations
    assert fit.topology_by_bin == ("bush", "ar")


def test_a_wheel_has_its_assets_inside_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "_PACKAGE", tmp_path / "entmtp_jax")
    assert assets_folder("trees") == tmp_path / "trees"
    (tmp_path / "entmtp_jax" / "_assets" / "trees").mkdir(parents=True)
    assert assets_folder("trees") == tmp_path / "entmtp_jax" / "_assets" / "trees"
    assert assets_folder("models") == tmp_path / "models"
