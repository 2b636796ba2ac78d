"""Every shipped folder of heads is complete, loads, and says where it comes from."""

import json

import jax.numpy as jnp
import pytest

from entmtp_jax.assemble import HYBRID_KINDS
from entmtp_jax.assets import assets_folder
from entmtp_jax.backbone.precision import linear_highest
from entmtp_jax.bank import load_bank
from entmtp_jax.checkpoints.head_files import load_head, read_head_info
from entmtp_jax.config import BackboneConfig
from entmtp_jax.heads.interface import Shared
from entmtp_jax.topology import check_fits

FOLDERS = sorted(path.parent for path in assets_folder("models").glob("*/heads/*/config.json"))
NAMES = ["/".join(folder.parts[-3:]) for folder in FOLDERS]


# vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim
BACKBONES = {"smollm2-135m-instruct": BackboneConfig(49152, 576, 1536, 30, 9, 3, 64)}


def test_the_default_model_has_these_heads():
    assert NAMES == [f"smollm2-135m-instruct/heads/{kind}" for kind in ("hydra", "medusa", "mtp")]


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_heads_load_and_fit_their_bank(folder):
    head, params = load(folder)
    kind = read_head_info(folder).kind
    assert kind == folder.name
    assert head.name == {"hydra": "hydra++"}.get(kind, kind)  # the shipped one has a prefix layer
    if kind == "medusa":
        assert params["blocks"]["kernel"].shape[0] == head.max_depth
    if kind == "mtp":
        assert len(params["modules"]) == 1 and head.max_depth == 7
    check_banks(assets_folder("trees") / folder.parent.parent.name / folder.name, head.max_depth)


def test_the_hybrid_has_a_bank_that_its_trained_half_can_draft():
    folder = assets_folder("models") / "smollm2-135m-instruct" / "heads" / HYBRID_KINDS[0]
    assert check_banks(assets_folder("trees") / "smollm2-135m-instruct" / "hybrid", load(folder)[0].max_depth) == 1


def load(folder):
    backbone = BACKBONES[folder.parent.parent.name]
    table = jnp.zeros((backbone.vocab_size, backbone.hidden_size))
    return load_head(folder, backbone, Shared(table, table), top_k=10, linear=linear_highest)


def check_banks(folder, depth):
    """Checks every bank in a folder; returns how many there are."""
    files = sorted(folder.glob("*.json"))
    for file in files:
        bank = load_bank(file)
        assert 3 <= len(bank.topologies) <= 6 and bank.topologies[0].depth == 0
        for topology in bank.topologies:
            check_fits(topology, num_heads=depth, top_k=10, capacity=512)
    return len(files)


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_card_and_provenance_agree(folder):
    provenance = json.loads((folder / "provenance.json").read_text())
    card = (folder / "card.md").read_text()
    assert {"command", "git_commit", "date", "versions", "result"} <= set(provenance)
    assert f"{provenance['result']['steps']:,} updates" in card
    for share in provenance["result"]["held_out"]["top1"]:
        assert f"{100 * share:.1f} %" in card
    assert (folder / "heads.safetensors").stat().st_size < 30e6  # four Hydra heads of four layers take 28 MB
