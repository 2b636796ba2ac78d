"""Every kind of head with random weights, over the tiny model."""

import functools

import jax
import numpy as np

from entmtp_jax.heads.hybrid import Pair, build_hybrid
from entmtp_jax.heads.hydra import build_hydra, prepare_hydra
from entmtp_jax.heads.hydra_layers import HydraConfig, init_hydra
from entmtp_jax.heads.interface import Head, Shared
from entmtp_jax.heads.lookup import build_lookup
from entmtp_jax.heads.medusa import MedusaConfig, build_medusa, prepare_medusa
from entmtp_jax.heads.mtp import build_mtp, prepare_mtp
from entmtp_jax.heads.mtp_layers import MTPConfig, init_modules
from entmtp_jax.parts import shared_matrices
from entmtp_jax.testing.tiny import TINY_CONFIG
from entmtp_jax.types import Params
from tests.decoding import tiny

V, D = TINY_CONFIG.vocab_size, TINY_CONFIG.hidden_size
DEPTH, TOP_K = 4, 10
DRAFT_IDS = np.random.default_rng(0).permutation(V)[:45].astype(np.int32)

SHAPES = {
    "medusa": MedusaConfig(D, V, num_heads=DEPTH, num_layers=2),
    "hydra": HydraConfig(D, V, num_heads=DEPTH, num_layers=3, prefix=False, own_output=True),
    "hydra++": HydraConfig(D, V, num_heads=DEPTH, num_layers=2, intermediate_size=40, draft_vocab_size=len(DRAFT_IDS)),
    "mtp": MTPConfig(D, V, 40, max_depth=DEPTH, draft_vocab_size=len(DRAFT_IDS)),
    "mtp of 3": MTPConfig(D, V, 40, max_depth=DEPTH, num_modules=3, embedding_first=False, normed_hidden=False),
}
KINDS = ["lookup", *SHAPES, "hybrid"]


def shared() -> Shared:
    """The tiny backbone's matrices."""
    return shared_matrices(tiny()[1])


@functools.cache
def head(kind: str) -> Head:
    """A head of that kind."""
    if kind == "lookup":
        return build_lookup(num_matches=TOP_K)
    if kind == "hybrid":
        return build_hybrid(build_lookup(min_suffix=2), head("mtp"))
    if kind == "medusa":
        return build_medusa(SHAPES[kind], top_k=TOP_K)
    build = build_mtp if kind.startswith("mtp") else build_hydra
    return build(SHAPES[kind], TINY_CONFIG, top_k=TOP_K)


@functools.cache
def head_params(kind: str) -> Params:
    """Random weights, so large that whatever a head reads changes what it offers."""
    if kind == "lookup":
        return {}
    if kind == "hybrid":
        return Pair({}, head_params("mtp"))
    shape, key = SHAPES[kind], jax.random.key(3)
    draft_ids = None if shape.draft_vocab_size is None else DRAFT_IDS
    if kind == "medusa":
        blocks = head(kind).init(key)["blocks"]
        noise = 0.3 * jax.random.normal(key, blocks["kernel"].shape)
        return prepare_medusa(shape, blocks | {"kernel": noise}, draft_ids, shared())
    if kind.startswith("mtp"):
        modules = init_modules(shape, shape.block(TINY_CONFIG), key)
        return prepare_mtp(_enlarged({"modules": modules}), draft_ids, shared())
    return prepare_hydra(shape, _enlarged(init_hydra(shape, shape.block(TINY_CONFIG), key)), draft_ids, shared())


def _enlarged(params: Params) -> Params:
    return jax.tree.map(lambda x: 8.0 * x if x.ndim > 1 else x, params)
