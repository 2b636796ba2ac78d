"""Hydra and Hydra++ heads as a ``Head``: drafting level by level, every node with the tokens of its own path."""

import functools
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.attention import Attend, causal_mask, two_part_attention
from entmtp_jax.backbone.cache import KVCache
from entmtp_jax.backbone.precision import Linear, linear_highest
from entmtp_jax.config import BackboneConfig
from entmtp_jax.heads.block import commit_entries, embed, empty_cache
from entmtp_jax.heads.candidates import Candidates, rank_candidates, scored_rows, scored_vocabulary
from entmtp_jax.heads.hydra_layers import HydraConfig, HydraHeads, HydraPrefix, init_hydra
from entmtp_jax.heads.interface import Features, Head, Shared, last_valid
from entmtp_jax.heads.levels import Level
from entmtp_jax.types import Array, Bool, Float, Int, Params, PRNGKey, RowInts


class HydraState(NamedTuple):
    """What is drafted from.

    Attributes:
      cache: keys and values ``[B, G, S, C]`` of the committed text; None without a prefix layer.
      prefix: ``[B, D]`` p_t of each row's last committed token.
    """

    cache: KVCache | None
    prefix: Float[Array, "B D"]


class _Parts(NamedTuple):
    """Static parts of the heads."""

    config: HydraConfig
    block: BackboneConfig
    top_k: int
    linear: Linear
    attend: Attend


def prepare_hydra(config: HydraConfig, params: Params, draft_ids: np.ndarray | None, shared: Shared) -> Params:
    """Parameters as the heads run with them: the draft ids, and the backbone's rows of them gathered once.

    Args:
      config: shape of the heads.
      params: ``{"heads": ..., "prefix": ...}``, of ``HydraHeads`` and, with a prefix layer, ``HydraPrefix``.
      draft_ids: ``[draft_vocab_size]`` int32 ids that the heads score, or None for all.
      shared: the backbone's matrices.
    """
    return params | scored_vocabulary(draft_ids, None if config.own_output else shared.output)


def build_hydra(
    config: HydraConfig,
    backbone: BackboneConfig,
    *,
    top_k: int = 10,
    linear: Linear = linear_highest,
    attend: Attend = two_part_attention,
) -> Head:
    """Hydra heads as a ``Head``; its parameters are those of ``prepare_hydra``.

    Args:
      config: shape of the heads.
      backbone: shape of the backbone, whose family the prefix layer belongs to.
      top_k: candidates ranked below a node, at most the scored ids.
      linear: the matrix product.
      attend: the attention function.

    Raises:
      UserError: ``top_k`` exceeds the scored ids.
    """
    config.check_top_k(top_k)
    parts = _Parts(config, config.block(backbone), top_k, linear, attend)
    return Head(
        name="hydra++" if config.prefix else "hydra",
        max_depth=config.num_heads,
        top_k=top_k,
        init=functools.partial(_init, parts),
        init_state=functools.partial(_init_state, parts),
        advance=functools.partial(_advance, parts),
        start=functools.partial(_start, parts),
        expand=functools.partial(_expand, parts),
    )


def _init(parts: _Parts, key: PRNGKey) -> Params:
    config = parts.config
    rows = jnp.zeros((config.num_scored, config.hidden_size))
    draft_ids = None if config.draft_vocab_size is None else np.arange(config.num_scored)
    return prepare_hydra(config, init_hydra(config, parts.block, key), draft_ids, Shared(rows, rows))


def _init_state(parts: _Parts, batch: int, slots: int) -> HydraState:
    return HydraState(
        cache=empty_cache(parts.block, batch, slots) if parts.config.prefix else None,
        prefix=jnp.zeros((batch, parts.config.hidden_size)),
    )


def _advance(
    parts: _Parts,
    params: Params,
    shared: Shared,
    state: HydraState,
    features: Features,
    tokens: Int[Array, "B T"],
    next_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> HydraState:
    del shared, next_tokens
    if state.cache is None:
        return HydraState(None, last_valid(features.normed, valid, state.prefix))
    starts = positions[:, 0]
    module = HydraPrefix(parts.block, parts.linear, parts.attend)
    arguments = (features.normed, positions, causal_mask(tokens.shape[1]), state.cache, starts)
    prefix, new = cast(tuple[Array, KVCache], module.apply({"params": params["prefix"]}, *arguments))
    # Entries past the valid ones land in slots that are not committed.
    prefix, cache = commit_entries(state.cache, prefix, new, starts)
    return HydraState(cache, last_valid(prefix, valid, state.prefix))


def _offer(
    parts: _Parts, params: Params, shared: Shared, state: HydraState, path: Float[Array, "B P tokens D"]
) -> tuple[Candidates, Array]:
    """Candidates below the nodes that these tokens lead to, and the tokens' embeddings to carry along."""
    prefix = jnp.broadcast_to(state.prefix[:, None], (*path.shape[:2], path.shape[-1]))
    module = HydraHeads(parts.config, parts.linear)
    variables = {"params": params["heads"]}
    hidden = module.apply(variables, prefix, path)
    rows = scored_rows(params, shared.output)
    logits = cast(Array, module.apply(variables, hidden, path.shape[2] - 1, rows, method="scores"))
    return rank_candidates(logits, parts.top_k, params.get("draft_ids")), path


def _start(
    parts: _Parts, params: Params, shared: Shared, state: HydraState, root: RowInts, depth: int
) -> tuple[Candidates, Array]:
    del depth
    return _offer(parts, params, shared, state, embed(shared.embedding, root)[:, None, None])


def _expand(
    parts: _Parts,
    params: Params,
    shared: Shared,
    state: HydraState,
    paths: Float[Array, "B above tokens D"],
    level: Level,
    tokens: Int[Array, "B P"],
) -> tuple[Candidates, Array]:
    added = embed(shared.embedding, tokens)[:, :, None]
    return _offer(parts, params, shared, state, jnp.concatenate([paths[:, level.sources], added], axis=2))
