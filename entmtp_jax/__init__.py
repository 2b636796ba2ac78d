"""Entropy-guided multi-token-prediction decoding in JAX.

Start with ``load_model``, ``load_draft`` and ``build_decoder``, or with ``python scripts/decode.py``.

The public names are loaded on first use, so that a command with a wrong flag answers before JAX is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entmtp_jax.acceptance import accept_matching
    from entmtp_jax.assemble import Draft, Model, load_draft, load_model, make_policy
    from entmtp_jax.backbone.transformer import Backbone, build_backbone
    from entmtp_jax.bank import Bank, load_bank, save_bank
    from entmtp_jax.config import BackboneConfig, RopeScaling
    from entmtp_jax.decode import DecodeConfig, Decoder, ModelParams, build_decoder
    from entmtp_jax.entropy import entropy_nats
    from entmtp_jax.errors import UserError
    from entmtp_jax.generation import Chunk, Completion, Generation, compile_decoder, generate, stream
    from entmtp_jax.heads.hybrid import build_hybrid
    from entmtp_jax.heads.hydra import build_hydra
    from entmtp_jax.heads.hydra_layers import HydraConfig
    from entmtp_jax.heads.interface import Head
    from entmtp_jax.heads.lookup import build_lookup
    from entmtp_jax.heads.medusa import MedusaConfig, build_medusa
    from entmtp_jax.heads.mtp import build_mtp
    from entmtp_jax.heads.mtp_layers import MTPConfig
    from entmtp_jax.hub import cache_folder
    from entmtp_jax.scheduler import Policy, Signal, fixed, hysteresis, ladder
    from entmtp_jax.state import Request
    from entmtp_jax.topology import Topology, autoregressive, chain, k_ary

_HOME = {
    "Backbone": "backbone.transformer",
    "BackboneConfig": "config",
    "Bank": "bank",
    "Chunk": "generation",
    "Completion": "generation",
    "DecodeConfig": "decode",
    "Decoder": "decode",
    "Draft": "assemble",
    "Generation": "generation",
    "Head": "heads.interface",
    "HydraConfig": "heads.hydra_layers",
    "MTPConfig": "heads.mtp_layers",
    "MedusaConfig": "heads.medusa",
    "Model": "assemble",
    "ModelParams": "decode",
    "Policy": "scheduler",
    "Request": "state",
    "RopeScaling": "config",
    "Signal": "scheduler",
    "Topology": "topology",
    "UserError": "errors",
    "accept_matching": "acceptance",
    "autoregressive": "topology",
    "build_backbone": "backbone.transformer",
    "build_decoder": "decode",
    "build_hybrid": "heads.hybrid",
    "build_hydra": "heads.hydra",
    "build_lookup": "heads.lookup",
    "build_medusa": "heads.medusa",
    "build_mtp": "heads.mtp",
    "cache_folder": "hub",
    "chain": "topology",
    "compile_decoder": "generation",
    "entropy_nats": "entropy",
    "fixed": "scheduler",
    "generate": "generation",
    "hysteresis": "scheduler",
    "k_ary": "topology",
    "ladder": "scheduler",
    "load_bank": "bank",
    "load_draft": "assemble",
    "load_model": "assemble",
    "make_policy": "assemble",
    "save_bank": "bank",
    "stream": "generation",
}

__all__ = [
    "Backbone",
    "BackboneConfig",
    "Bank",
    "Chunk",
    "Completion",
    "DecodeConfig",
    "Decoder",
    "Draft",
    "Generation",
    "Head",
    "HydraConfig",
    "MTPConfig",
    "MedusaConfig",
    "Model",
    "ModelParams",
    "Policy",
    "Request",
    "RopeScaling",
    "Signal",
    "Topology",
    "UserError",
    "accept_matching",
    "autoregressive",
    "build_backbone",
    "build_decoder",
    "build_hybrid",
    "build_hydra",
    "build_lookup",
    "build_medusa",
    "build_mtp",
    "cache_folder",
    "chain",
    "compile_decoder",
    "entropy_nats",
    "fixed",
    "generate",
    "hysteresis",
    "k_ary",
    "ladder",
    "load_bank",
    "load_draft",
    "load_model",
    "make_policy",
    "save_bank",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
