"""MTP module: one transformer block that drafts recursively (DeepSeek-V3, section 2.2; MiMo; FastMTP).

At position t it reads the hidden state h_t and the embedding of the token at t+1, and predicts the token at
t+2: ``x_t = block(projection [norm(embedding), norm(h_t)])``, logits from ``norm(x_t)``. Along a drafted
path it reads its own output in place of the backbone's. It has keys and values of its own: of the committed
text, and of the drafted nodes, of which a node sees its ancestors only.
"""

import dataclasses
import functools
from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.attention import Attend, causal_mask, two_part_attention
from entmtp_jax.backbone.cache import KVCache
from entmtp_jax.backbone.precision import Linear, linear_highest
from entmtp_jax.backbone.rope import rope_frequencies, rope_tables
from entmtp_jax.backbone.transformer import Layer, RMSNorm
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.heads.block import (
    attend_below,
    block_config,
    commit_entries,
    embed,
    empty_cache,
    join_entries,
    one_layer,
)
from entmtp_jax.heads.candidates import Candidates, ScoredIds, rank_candidates, scored_rows, scored_vocabulary
from entmtp_jax.heads.interface import Features, Head, Shared, last_valid
from entmtp_jax.heads.levels import Level
from entmtp_jax.types import Array, Bool, Float, Int, Params, PRNGKey, RowInts


@dataclasses.dataclass(frozen=True)
class MTPConfig(ScoredIds):
    """Shape of an MTP head.

    Attributes:
      hidden_size: D of the backbone.
      vocab_size: V of the backbone.
      max_depth: tokens that it may draft along a path.
      num_modules: 1 for one module applied recursively; otherwise level i uses module i, and levels beyond the
        last module use the last.
      draft_vocab_size: ids that are scored; None means all of them.
      intermediate_size: of the block's MLP; the block is of the backbone's family and otherwise of its shape.
      embedding_first: the projection reads [embedding, hidden], as released weights do; otherwise [hidden, embedding].
      normed_hidden: hidden states are read after the final norm, the backbone's as the module's own.
    """

    hidden_size: int
    vocab_size: int
    intermediate_size: int
    max_depth: int = 7
    num_modules: int = 1
    draft_vocab_size: int | None = None
    embedding_first: bool = True
    normed_hidden: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_modules <= self.max_depth:
            raise UserError(f"an MTP head needs at least one module and no more than levels; got {self}")
        self.check_scored()

    def block(self, backbone: BackboneConfig) -> BackboneConfig:
        """Shape of the block: one layer of the backbone's family."""
        return block_config(backbone, self.intermediate_size)


class MTPModule(nn.Module):
    """One module: two norms, the projection, a transformer layer and the final norm."""

    config: MTPConfig
    block: BackboneConfig
    linear: Linear = linear_highest
    attend: Attend = two_part_attention

    def setup(self) -> None:
        c, eps = self.config, self.block.norm_eps
        self.embedding_norm, self.hidden_norm, self.final_norm = RMSNorm(eps), RMSNorm(eps), RMSNorm(eps)
        self.projection = self.param("projection", nn.initializers.normal(0.02), (c.hidden_size, 2 * c.hidden_size))
        self.layer = Layer(self.block, self.linear, self.attend)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        self_mask: Bool[Array, "#B T T"],
        cached: KVCache,
        lengths: RowInts,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """The block's output before the final norm, and the keys and values of the T new entries.

        Args:
          hidden: of the backbone, or of this head's previous level.
          embedded: embeddings of the tokens after these positions.
          positions: absolute positions of the entries.
          self_mask: which entry sees which.
          cached: ``[B, G, S, C]`` keys and values of the committed text; read only.
          lengths: ``[B]`` committed entries.
        """
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        joined = jnp.concatenate(parts if self.config.embedding_first else parts[::-1], axis=-1)
        x = self.linear(joined, self.projection)
        rope = rope_tables(rope_frequencies(self.block), positions)
        x, (new, _) = self.layer(x, *one_layer(cached), rope, self_mask, lengths)
        return x, new

    def normed(self, x: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
        """The block's output after the final norm: what is scored."""
        return self.final_norm(x)


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


def init_modules(config: MTPConfig, block: BackboneConfig, key: PRNGKey) -> list[Params]:
    """Random parameters of every module."""
    one = jnp.zeros((1, 1, config.hidden_size))
    place, length = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)

    def touch_all(module: MTPModule) -> Array:
        return module.normed(module(one, one, place, causal_mask(1), empty_cache(block, 1, 1), length)[0])

    module = MTPModule(config, block)
    return [nn.init(touch_all, module)(key)["params"] for key in jax.random.split(key, config.num_modules)]


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
