"""Which head and bank a name stands for."""

from typing import Any

import jax
import numpy as np
import pytest

from entmtp_jax import assemble
from entmtp_jax.assemble import Model, load_draft
from entmtp_jax.backbone.attention import two_part_attention
from entmtp_jax.backbone.precision import linear_highest
from entmtp_jax.bank import Bank, save_bank
from entmtp_jax.checkpoints.head_files import save_head
from entmtp_jax.checkpoints.head_kinds import expected_params
from entmtp_jax.errors import UserError
from entmtp_jax.heads.hydra_layers import HydraConfig
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.heads.mtp_layers import MTPConfig
from entmtp_jax.testing.tiny import TINY_CONFIG
from entmtp_jax.topology import chain, k_ary
from tests.decoding import tiny

V, D = TINY_CONFIG.vocab_size, TINY_CONFIG.hidden_size
SHAPES = {
    "medusa": MedusaConfig(D, V, num_heads=2),
    "hydra": HydraConfig(D, V, num_heads=4, intermediate_size=24),
    "mtp": MTPConfig(D, V, 24, max_depth=7),
}


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """Folders ``models`` and ``trees`` of the test's own."""
    monkeypatch.setattr(assemble, "assets_folder", lambda name: tmp_path / name)
    return tmp_path


def ship(assets, kind, fingerprint="f"):
    shape = SHAPES[kind]
    save_head(
        assets / "models" / "tiny" / "heads" / kind,
        shape=shape,
        backbone=TINY_CONFIG,
        params=jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), expected_params(shape, TINY_CONFIG)),
        draft_ids=None,
        backbone_name="tiny",
        backbone_fingerprint=fingerprint,
        draft_vocab={},
        provenance={},
    )


def model():
    backbone, params = tiny()
    text: Any = None  # nothing is read or written here
    return Model(
        name="tiny",
        dtype="float32",
        arithmetic="",
        config=TINY_CONFIG,
        backbone=backbone,
        params=params,
        linear=linear_highest,
        attend=two_part_attention,
        head_dtype="float32",
        text=text,
        fingerprint="f",
    )


def draft(heads, bank=None, said=None):
    return load_draft(model(), heads, bank, notify=(said if said is not None else []).append)


def test_shipped_kinds_by_their_names(assets):
    for kind in SHAPES:
        ship(assets, kind)
    found = {kind: draft(kind) for kind in ("lookup", "medusa", "hydra", "mtp", "hybrid")}
    assert {kind: one.head.name for kind, one in found.items()} == {
        "lookup": "lookup",
        "medusa": "medusa",
        "hydra": "hydra++",
        "mtp": "mtp",
        "hybrid": "lookup+mtp",
    }
    assert all(one.name == kind for kind, one in found.items())
    by_path = draft(str(assets / "models" / "tiny" / "heads" / "hydra"))
    assert by_path.head.max_depth == 4


def test_the_default_bank_is_as_deep_as_the_heads(assets):
    for kind in SHAPES:
        ship(assets, kind)
    depths = {kind: [tree.depth for tree in draft(kind).bank.topologies] for kind in SHAPES}
    assert depths == {"medusa": [0, 2], "hydra": [0, 3, 4], "mtp": [0, 3, 7]}


def test_a_shipped_bank_belongs_to_model_and_heads(assets):
    ship(assets, "mtp")
    save_bank(Bank("mixed", (chain(2), k_ary((3,)))), assets / "trees" / "tiny" / "hybrid" / "general.json")
    shipped = draft("hybrid")
    assert [tree.name for tree in shipped.bank.topologies] == ["ar", "chain2", "kary3"]
    assert shipped.head.top_k == 3, "no more candidates than the bank places"
    own = draft("hybrid", Bank("own", (chain(1),)))
    assert [tree.name for tree in own.bank.topologies] == ["ar", "chain1"] and own.head.top_k == 1


def test_without_a_name_heads_are_hybrid_or_lookup(assets):
    said: list[str] = []
    assert draft(None, said=said).head.name == "lookup" and "no heads are shipped for tiny" in said[0]
    ship(assets, "mtp")
    assert draft(None).head.name == "lookup+mtp"


def test_lookup_ranks_as_many_candidates_as_the_bank_places(assets):
    wide = Bank("wide", (k_ary((10,)), chain(2)))
    assert draft("lookup", wide).head.top_k == 10
    assert draft("lookup", Bank("narrow", (chain(2),))).head.top_k == 8


def test_a_hybrid_takes_the_best_shipped_kind(assets):
    with pytest.raises(UserError, match="'hybrid' need trained heads, but tiny ships none"):
        draft("hybrid")
    for kind in ("medusa", "hydra", "mtp"):
        ship(assets, kind)
        name = draft("hybrid").head.name
        assert name == {"medusa": "lookup+medusa", "hydra": "lookup+hydra++", "mtp": "lookup+mtp"}[kind]


def test_unknown_names_say_what_is_there(assets):
    ship(assets, "mtp")
    with pytest.raises(UserError, match="tiny ships mtp; give 'lookup', 'hybrid', a shipped kind or a head folder"):
        draft("eagle")


def test_heads_of_other_weights_are_told(assets):
    ship(assets, "mtp", fingerprint="another")
    said: list[str] = []
    draft("hybrid", said=said)
    assert len(said) == 1 and "trained on other weights than tiny" in said[0]
