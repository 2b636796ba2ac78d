"""MTP module as a ``Head``: drafting level by level, every node with the entries of its own ancestors."""

import functools
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.attention import Attend, causal_mask, two_part_attention
from entmtp_jax.backbone.cache import KVCache
from entmtp_jax.backbone.precision import Linear, linear_highest
from entmtp_jax.config import BackboneConfig
from entmtp_jax.heads.block import (
    attend_below,
    commit_entries,
    embed,
    empty_cache,
    join_entries,
)
from entmtp_jax.heads.candidates import Candidates, rank_candidates, scored_rows, scored_vocabulary
from entmtp_jax.heads.interface import Features, Head, Shared, last_valid
from entmtp_jax.heads.levels import Level
from entmtp_jax.heads.mtp_layers import MTPConfig, MTPModule, init_modules
from entmtp_jax.types import Array, Bool, Float, Int, Params, PRNGKey, RowInts


class MTPState(NamedTuple):
    """What is drafted from.

    Attributes:
      caches: of each module, keys and values ``[B, G, S, C]`` of the committed text.
      length: ``[B]`` committed entries.
      output: ``[B, D]`` the first module's output at the last of them, before the final norm.
    """

    caches: tuple[KVCache, ...]
    length: RowInts
    output: Float[Array, "B D"]


class _Drafted(NamedTuple):
    """What the next level reads: hidden states of the last level, and keys and values of all live nodes so far."""

    hidden: Float[Array, "B P D"]
    entries: KVCache | None


class _Parts(NamedTuple):
    """Static parts of a head."""

    config: MTPConfig
    block: BackboneConfig
    top_k: int
    linear: Linear
    attend: Attend

    def run(self, params: Params, attend: Attend, *arguments: Array | KVCache) -> tuple[Array, KVCache]:
        """A module's output and new entries."""
        module = MTPModule(self.config, self.block, self.linear, attend)
        return cast(tuple[Array, KVCache], module.apply({"params": params}, *arguments))


def prepare_mtp(params: Params, draft_ids: np.ndarray | None, shared: Shared) -> Params:
    """Parameters as the head runs with them: the draft ids, and the backbone's rows of them gathered once.

    Args:
      params: trained ``{"modules": [...]}``, each of an ``MTPModule``.
      draft_ids: ``[draft_vocab_size]`` int32 ids that the head scores, or None for all.
      shared: the backbone's matrices.
    """
    return params | scored_vocabulary(draft_ids, shared.output)


def build_mtp(
    config: MTPConfig,
    backbone: BackboneConfig,
    *,
    top_k: int = 10,
    linear: Linear = linear_highest,
    attend: Attend = two_part_attention,
) -> Head:
    """An MTP head as a ``Head``; its parameters are those of ``prepare_mtp``.

    Args:
      config: shape.
      backbone: shape of the backbone, whose family the block belongs to.
      top_k: candidates ranked below a node, at most the scored ids.
      linear: the matrix product.
      attend: the attention function.

    Raises:
      UserError: ``top_k`` exceeds the scored ids.
    """
    config.check_top_k(top_k)
    parts = _Parts(config, config.block(backbone), top_k, linear, attend)
    return Head(
        name="mtp",
        max_depth=config.max_depth,
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
    return prepare_mtp({"modules": init_modules(config, parts.block, key)}, draft_ids, Shared(rows, rows))


def _init_state(parts: _Parts, batch: int, slots: int) -> MTPState:
    return MTPState(
        caches=tuple(empty_cache(parts.block, batch, slots) for _ in range(parts.config.num_modules)),
        length=jnp.zeros(batch, jnp.int32),
        output=jnp.zeros((batch, parts.config.hidden_size)),
    )


def _advance(
    parts: _Parts,
    params: Params,
    shared: Shared,
    state: MTPState,
    features: Features,
    tokens: Int[Array, "B T"],
    next_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> MTPState:
    hidden = features.normed if parts.config.normed_hidden else features.hidden
    embedded = embed(shared.embedding, next_tokens)
    starts, mask = positions[:, 0], causal_mask(tokens.shape[1])
    committed = []
    for one, cache in zip(params["modules"], state.caches, strict=True):
        output, new = parts.run(one, parts.attend, hidden, embedded, positions, mask, cache, starts)
        # Entries past the valid ones land in slots that are not committed.
        committed.append(commit_entries(cache, output, new, starts))
    outputs, caches = zip(*committed, strict=True)
    count = valid.sum(axis=1)
    return MTPState(
        caches=caches,
        length=jnp.where(count > 0, starts + count, state.length),
        output=last_valid(outputs[0], valid, state.output),
    )


def _offer(
    parts: _Parts, params: Params, shared: Shared, index: int, output: Float[Array, "B P D"]
) -> tuple[Candidates, Float[Array, "B P D"]]:
    """Candidates from a module's output, and the hidden state that the next level reads."""
    module = MTPModule(parts.config, parts.block, parts.linear)
    normed = cast(Array, module.apply({"params": params["modules"][index]}, output, method="normed"))
    logits = parts.linear(normed, scored_rows(params, shared.output))
    candidates = rank_candidates(logits, parts.top_k, params.get("draft_ids"))
    return candidates, normed if parts.config.normed_hidden else output


def _start(
    parts: _Parts, params: Params, shared: Shared, state: MTPState, root: RowInts, depth: int
) -> tuple[Candidates, _Drafted]:
    del root, depth  # the root was taken in when the text before it was committed
    first, hidden = _offer(parts, params, shared, 0, state.output[:, None])
    return first, _Drafted(hidden, None)


def _expand(
    parts: _Parts,
    params: Params,
    shared: Shared,
    state: MTPState,
    drafted: _Drafted,
    level: Level,
    tokens: Int[Array, "B P"],
) -> tuple[Candidates, _Drafted]:
    """Runs the module of a level on its live nodes."""
    index = min(level.depth, parts.config.num_modules - 1)
    # The root's entry stands at position length - 1, so a node of depth d stands at length - 1 + d.
    positions = jnp.broadcast_to((state.length + level.depth - 1)[:, None], tokens.shape)
    attend = attend_below(parts.attend, drafted.entries, jnp.asarray(level.visible)[None])
    output, new = parts.run(
        params["modules"][index],
        attend,
        drafted.hidden[:, level.sources],
        embed(shared.embedding, tokens),
        positions,
        jnp.eye(tokens.shape[1], dtype=bool)[None],
        state.caches[index],
        state.length,
    )
    candidates, hidden = _offer(parts, params, shared, index, output)
    return candidates, _Drafted(hidden, join_entries(drafted.entries, new))
