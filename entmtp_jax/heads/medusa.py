"""Medusa heads: every position ahead is guessed in parallel from one hidden state (Medusa, section 2.1.1).

Head i predicts the token at t+2+i: ``output(block_L(... block_1(h_t)))`` with residual blocks
``x + silu(W x + b)`` whose W starts at zero. A head may score only a draft vocabulary, a subset of the
ids, and either owns its output matrix or shares the backbone's rows of these ids.
"""

import dataclasses
import functools
from typing import NamedTuple, cast

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.precision import Linear, linear_highest
from entmtp_jax.errors import UserError
from entmtp_jax.heads.candidates import Candidates, ScoredIds, rank_candidates, scored_rows, scored_vocabulary
from entmtp_jax.heads.interface import Features, Head, Shared, last_valid
from entmtp_jax.heads.levels import Level
from entmtp_jax.types import Array, Bool, Float, Int, Params, PRNGKey, RowInts


@dataclasses.dataclass(frozen=True)
class MedusaConfig(ScoredIds):
    """Shape of a set of Medusa heads.

    Attributes:
      hidden_size: D of the backbone.
      vocab_size: V of the backbone.
      num_heads: K.
      num_layers: residual blocks of each head.
      draft_vocab_size: ids that the heads score; None means all of them.
      own_output: each head has an output matrix of its own; otherwise all share the backbone's rows.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    draft_vocab_size: int | None = None
    own_output: bool = False

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 1:
            raise UserError(f"Medusa heads need at least one head and one layer; got {self}")
        self.check_scored()


class MedusaBlocks(nn.Module):
    """Residual blocks of all heads, and their output matrices if they own them."""

    config: MedusaConfig
    linear: Linear = linear_highest

    def setup(self) -> None:
        c = self.config
        self.kernel = self.param("kernel", nn.initializers.zeros, (c.num_heads, c.num_layers, *[c.hidden_size] * 2))
        self.bias = self.param("bias", nn.initializers.zeros, (c.num_heads, c.num_layers, c.hidden_size))
        if c.own_output:
            normal = nn.initializers.normal(0.02)
            self.output = self.param("output", normal, (c.num_heads, c.num_scored, c.hidden_size))

    def __call__(
        self, normed: Float[Array, "*any D"], shared_output: Float[Array, "X D"], depth: int
    ) -> list[Float[Array, "*any scored"]]:
        """Logits of heads ``0 .. depth - 1`` over the scored ids.

        Args:
          normed: final normed hidden state of the backbone.
          shared_output: the backbone's rows of the scored ids; unused by heads that own theirs.
          depth: how many heads to run.
        """
        states = self.states(normed, depth)
        if self.config.own_output:
            return [self.linear(x, self.output[i]) for i, x in enumerate(states)]
        # One product for all heads, so that the shared matrix is read once.
        logits = self.linear(jnp.stack(states), shared_output)
        return [logits[i] for i in range(depth)]

    def states(self, normed: Float[Array, "*any D"], depth: int) -> list[Float[Array, "*any D"]]:
        """Outputs of the residual blocks of heads ``0 .. depth - 1``: what is multiplied with output rows."""
        states = []
        for i in range(depth):
            x = normed
            for layer in range(self.config.num_layers):
                x = x + nn.silu(self.linear(x, self.kernel[i, layer]) + self.bias[i, layer])
            states.append(x)
        return states


class MedusaState(NamedTuple):
    """What the heads draft from.

    Attributes:
      normed: ``[B, D]`` final normed hidden state of each row's last committed token.
    """

    normed: Float[Array, "B D"]


def prepare_medusa(config: MedusaConfig, params: Params, draft_ids: np.ndarray | None, shared: Shared) -> Params:
    """Parameters as the head runs with them: the draft ids, and the backbone's rows of them gathered once.

    Args:
      config: shape of the heads.
      params: trained parameters of ``MedusaBlocks``.
      draft_ids: ``[draft_vocab_size]`` int32 ids that the heads score, or None for all.
      shared: the backbone's matrices.
    """
    return {"blocks": params} | scored_vocabulary(draft_ids, None if config.own_output else shared.output)


def build_medusa(config: MedusaConfig, *, top_k: int = 10, linear: Linear = linear_highest) -> Head:
    """Medusa heads as a ``Head``; its parameters are those of ``prepare_medusa``.

    Args:
      config: shape of the heads.
      top_k: candidates ranked per head, at most the scored ids.
      linear: the matrix product.

    Raises:
      UserError: ``top_k`` exceeds the scored ids.
    """
    config.check_top_k(top_k)
    module = MedusaBlocks(config, linear)
    return Head(
        name="medusa",
        max_depth=config.num_heads,
        top_k=top_k,
        init=functools.partial(_init, module),
        init_state=functools.partial(_init_state, config.hidden_size),
        advance=_advance,
        start=functools.partial(_start, module, top_k),
        expand=_expand,
    )


def init_medusa(config: MedusaConfig, key: PRNGKey) -> Params:
    """Parameters of ``MedusaBlocks``: blocks that pass the hidden state on, random output matrices."""
    one = jnp.zeros((1, config.hidden_size))
    rows = jnp.zeros((config.num_scored, config.hidden_size))
    return MedusaBlocks(config).init(key, one, rows, config.num_heads)["params"]


def _init(module: MedusaBlocks, key: PRNGKey) -> Params:
    config = module.config
    rows = jnp.zeros((config.num_scored, config.hidden_size))
    draft_ids = None if config.draft_vocab_size is None else np.arange(config.num_scored)
    return prepare_medusa(config, init_medusa(config, key), draft_ids, Shared(rows, rows))


def _init_state(hidden_size: int, batch: int, slots: int) -> MedusaState:
    del slots
    return MedusaState(normed=jnp.zeros((batch, hidden_size)))


def _advance(
    params: Params,
    shared: Shared,
    state: MedusaState,
    features: Features,
    tokens: Int[Array, "B T"],
    next_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> MedusaState:
    del params, shared, tokens, next_tokens, positions
    return MedusaState(normed=last_valid(features.normed, valid, state.normed))


def _start(
    module: MedusaBlocks, top_k: int, params: Params, shared: Shared, state: MedusaState, root: RowInts, depth: int
) -> tuple[Candidates, Candidates]:
    """Candidates after the root, and those of every depth to carry along: parallel heads see no drafts."""
    del root
    output = scored_rows(params, shared.output)
    logits = cast(list[Array], module.apply({"params": params["blocks"]}, state.normed, output, depth))
    by_depth = rank_candidates(jnp.stack(logits, axis=1), top_k, params.get("draft_ids"))
    return Candidates(by_depth.tokens[:, :1], by_depth.logprobs[:, :1]), by_depth


def _expand(
    params: Params, shared: Shared, state: MedusaState, by_depth: Candidates, level: Level, tokens: Int[Array, "B P"]
) -> tuple[Candidates, Candidates]:
    del params, shared, state
    same = [level.depth] * tokens.shape[1]
    return Candidates(by_depth.tokens[:, same], by_depth.logprobs[:, same]), by_depth
