"""Every shipped folder of heads is complete, loads, and says where it comes from."""

import json

import jax.numpy as jnp
import pytest

from entmtp_jax.assets import assets_folder
from entmtp_jax.backbone.precision import linear_highest
from entmtp_jax.bank import load_bank
from entmtp_jax.checkpoints.head_files import load_head, read_head_info
from entmtp_jax.config import BackboneConfig
from entmtp_jax.heads.interface import Shared
from entmtp_jax.topology import check_fits

FOLDERS = sorted(path.parent for path in assets_folder("models").glob("*/heads/*/config.json"))
NAMES = ["/".join(folder.parts[-3:]) for folder in FOLDERS]


def test_the_default_model_has_medusa_heads():
    assert "smollm2-135m-instruct/heads/medusa" in NAMES


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_heads_load_and_fit_their_bank(folder):
    shape = read_head_info(folder).shape
    backbone = BackboneConfig(shape.vocab_size, shape.hidden_size, 1, 1, 1, 1, 2)
    table = jnp.zeros((shape.vocab_size, shape.hidden_size))
    head, params = load_head(folder, backbone, Shared(table, table), top_k=10, linear=linear_highest)
    assert params["blocks"]["kernel"].shape[0] == head.max_depth
    banks = assets_folder("trees") / folder.parent.parent.name / folder.name
    for file in sorted(banks.glob("*.json")):
        bank = load_bank(file)
        assert 3 <= len(bank.topologies) <= 6 and bank.topologies[0].depth == 0
        for topology in bank.topologies:
            check_fits(topology, num_heads=head.max_depth, top_k=10, capacity=512)


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_card_and_provenance_agree(folder):
    provenance = json.loads((folder / "provenance.json").read_text())
    card = (folder / "card.md").read_text()
    assert {"command", "git_commit", "date", "versions", "result"} <= set(provenance)
    assert f"{provenance['result']['steps']:,} updates" in card
    for share in provenance["result"]["held_out"]["top1"]:
        assert f"{100 * share:.1f} %" in card
    assert (folder / "heads.safetensors").stat().st_size < 20e6
