"""The kinds of heads that are kept on disk: their shapes, tensors and how a ``Head`` is built from them.

A tensor's name is its place among the parameters, joined by dots; weights are ``[out, in]``. D is the
backbone's hidden size, X the scored ids, F the block's MLP size, and G, H, C are those of the backbone.

=============================================  ============================  ================================
medusa                                         shape                         meaning
=============================================  ============================  ================================
kernel, bias                                   [K, layers, D, D], [.., D]    residual blocks
output                                         [K, X, D]                     only if the heads own theirs
=============================================  ============================  ================================

=============================================  ============================  ================================
hydra (with ``prefix`` in the shape Hydra++)   shape                         meaning
=============================================  ============================  ================================
heads.head_I.skip.kernel, .bias                [D, D * (I + 2)], [D]         linear part of the first layer
heads.head_I.entry.kernel, .bias               [D, D * (I + 2)], [D]         its part inside the SiLU
heads.head_I.residual.kernel, .bias            [D, D], [D]                   only with more than one layer
heads.head_I.output.kernel, .bias              [X, D], [X]                   only if the heads own theirs
prefix.layer.*                                 as modules.I.layer.* below    only with a prefix layer
prefix.norm.scale                              [D]                           only with a prefix layer
=============================================  ============================  ================================

=============================================  ============================  ================================
mtp                                            shape                         meaning
=============================================  ============================  ================================
modules.I.embedding_norm.scale                 [D]                           DeepSeek's enorm
modules.I.hidden_norm.scale                    [D]                           hnorm
modules.I.projection                           [D, 2 * D]                    eh_proj
modules.I.layer.attention_norm.scale           [D]                           the block
modules.I.layer.attention.qkv                  [G, H / G + 2, C, D]          queries, key and value of a group
modules.I.layer.attention.qkv_bias             [G, H / G + 2, C]             only if the backbone has one
modules.I.layer.attention.output               [D, H * C]
modules.I.layer.mlp_norm.scale                 [D]
modules.I.layer.mlp.gate_up, .down             [2 * F, D], [D, F]
modules.I.final_norm.scale                     [D]                           shared_head.norm
=============================================  ============================  ================================
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from entmtp_jax.backbone.attention import Attend
from entmtp_jax.backbone.precision import Linear
from entmtp_jax.config import BackboneConfig
from entmtp_jax.heads.hydra import build_hydra, prepare_hydra
from entmtp_jax.heads.hydra_layers import HydraConfig, init_hydra
from entmtp_jax.heads.interface import Head, Shared
from entmtp_jax.heads.medusa import MedusaConfig, build_medusa, init_medusa, prepare_medusa
from entmtp_jax.heads.mtp import build_mtp, prepare_mtp
from entmtp_jax.heads.mtp_layers import MTPConfig, init_modules
from entmtp_jax.json_files import COUNT, Key, Kind
from entmtp_jax.types import Params, PRNGKey

HeadShape: TypeAlias = MedusaConfig | HydraConfig | MTPConfig

FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT_OR_NULL = Kind("a non-negative integer or null", lambda value: value is None or COUNT.holds(value))
_JSON_KINDS: dict[Any, Kind] = {int: COUNT, int | None: COUNT_OR_NULL, bool: FLAG}


class HeadKind(NamedTuple):
    """One kind of heads.

    Attributes:
      shape: class of their config.
      init: ``(shape, backbone, key) -> params`` as they are trained and stored.
      prepare: ``(shape, params, draft_ids, shared) -> params`` as they run.
      build: ``(shape, backbone, *, top_k, linear, attend) -> Head``.
    """

    shape: type[HeadShape]
    init: Callable[[Any, BackboneConfig, PRNGKey], Params]
    prepare: Callable[[Any, Params, np.ndarray | None, Shared], Params]
    build: Callable[..., Head]


def _init_medusa(shape: MedusaConfig, backbone: BackboneConfig, key: PRNGKey) -> Params:
    del backbone
    return init_medusa(shape, key)


def _build_medusa(shape: MedusaConfig, backbone: BackboneConfig, *, top_k: int, linear: Linear, attend: Attend) -> Head:
    del backbone, attend
    return build_medusa(shape, top_k=top_k, linear=linear)


def _init_hydra(shape: HydraConfig, backbone: BackboneConfig, key: PRNGKey) -> Params:
    return init_hydra(shape, shape.block(backbone), key)


def _init_mtp(shape: MTPConfig, backbone: BackboneConfig, key: PRNGKey) -> Params:
    return {"modules": init_modules(shape, shape.block(backbone), key)}


def _prepare_mtp(shape: MTPConfig, params: Params, draft_ids: np.ndarray | None, shared: Shared) -> Params:
    del shape
    return prepare_mtp(params, draft_ids, shared)


KINDS = {
    "medusa": HeadKind(MedusaConfig, _init_medusa, prepare_medusa, _build_medusa),
    "hydra": HeadKind(HydraConfig, _init_hydra, prepare_hydra, build_hydra),
    "mtp": HeadKind(MTPConfig, _init_mtp, _prepare_mtp, build_mtp),
}


def kind_of(shape: HeadShape) -> str:
    """Name of the kind that a config belongs to."""
    return next(name for name, kind in KINDS.items() if isinstance(shape, kind.shape))


def shape_keys(kind: HeadKind) -> dict[str, Key]:
    """The keys of a kind's config in a JSON file, all of them required."""
    return {field.name: Key(_JSON_KINDS[field.type]) for field in dataclasses.fields(kind.shape)}


def expected_params(shape: HeadShape, backbone: BackboneConfig) -> Params:
    """The parameters of a config as shapes without values."""
    kind = KINDS[kind_of(shape)]
    return jax.eval_shape(lambda key: kind.init(shape, backbone, key), jax.random.key(0))


def flat_names(params: Params) -> dict[str, Any]:
    """Leaves by name, in the order of ``jax.tree.leaves``.

    Example: ``{"modules": [{"projection": p}]}`` has the name ``modules.0.projection``.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
