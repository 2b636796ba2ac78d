"""Medusa heads: every position ahead is guessed in parallel from one hidden state (Medusa, section 2.1.1).

Head i predicts the token at t+2+i: ``output(block_L(... block_1(h_t)))`` with residual blocks
``x + silu(W x + b)`` whose W starts at zero. A head may score only a draft vocabulary, a subset of the
ids, and either owns its output matrix or shares the backbone's rows of these ids.
"""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.precision import Linear, linear_highest
from entmtp_jax.errors import UserError
from entmtp_jax.heads.interface import Draft, Features, Head, Proposal, Shared, last_valid
from entmtp_jax.topology import Topology
from entmtp_jax.types import Array, Bool, Float, Int, Params, PRNGKey, RowInts


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
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
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise UserError(f"draft vocabulary of {self.draft_vocab_size} ids, but the model has {self.vocab_size}")

    @property
    def num_scored(self) -> int:
        """Ids that the heads score."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


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
        states = []
        for i in range(depth):
            x = normed
            for layer in range(self.config.num_layers):
                x = x + nn.silu(self.linear(x, self.kernel[i, layer]) + self.bias[i, layer])
            states.append(x)
        if self.config.own_output:
            return [self.linear(x, self.output[i]) for i, x in enumerate(states)]
        # One product for all heads, so that the shared matrix is read once.
        logits = self.linear(jnp.stack(states), shared_output)
        return [logits[i] for i in range(depth)]


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
    prepared = {"blocks": params}
    if draft_ids is not None:
        ids = jnp.asarray(draft_ids, jnp.int32)
        prepared["draft_ids"] = ids
        if not config.own_output:
            prepared["output"] = jnp.take(shared.output, ids, axis=0)
    return prepared


def build_medusa(config: MedusaConfig, *, top_k: int = 10, linear: Linear = linear_highest) -> Head:
    """Medusa heads as a ``Head``; its parameters are those of ``prepare_medusa``.

    Args:
      config: shape of the heads.
      top_k: candidates ranked per head, at most the scored ids.
      linear: the matrix product.
    """
    module = MedusaBlocks(config, linear)
    if top_k > config.num_scored:
        raise UserError(f"top-k of {top_k} candidates, but the heads score only {config.num_scored} ids")

    def init(key: PRNGKey) -> Params:
        one = jnp.zeros((1, config.hidden_size))
        rows = jnp.zeros((config.num_scored, config.hidden_size))
        blocks = module.init(key, one, rows, config.num_heads)["params"]
        draft_ids = None if config.draft_vocab_size is None else np.arange(config.num_scored)
        return prepare_medusa(config, blocks, draft_ids, Shared(rows, rows))

    def init_state(batch: int, slots: int) -> MedusaState:
        del slots
        return MedusaState(normed=jnp.zeros((batch, config.hidden_size)))

    def advance(
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

    def propose(params: Params, shared: Shared, state: MedusaState, root: RowInts, depth: int) -> Proposal:
        del root  # parallel heads do not look at it
        output = params["output"] if "output" in params else shared.output
        logits = module.apply({"params": params["blocks"]}, state.normed, output, depth)
        logprobs, ids = zip(*(jax.lax.top_k(jax.nn.log_softmax(head, axis=-1), top_k) for head in logits), strict=True)
        tokens = jnp.stack(ids, axis=1)
        if "draft_ids" in params:
            tokens = params["draft_ids"][tokens]
        stacked = jnp.stack(logprobs, axis=1)
        return Proposal(chain_logprobs=stacked[:, :, 0], parts=(tokens, stacked))

    def complete(
        params: Params, shared: Shared, state: MedusaState, root: RowInts, proposal: Proposal, topology: Topology
    ) -> Draft:
        del params, shared, state
        tokens, logprobs = proposal.parts
        head = np.asarray(topology.depths[1:]) - 1
        rank = np.asarray(topology.ranks[1:])
        return Draft(
            tokens=jnp.concatenate([root[:, None], tokens[:, head, rank]], axis=1),
            logprobs=jnp.pad(logprobs[:, head, rank], ((0, 0), (1, 0))),
        )

    return Head(
        name="medusa",
        max_depth=config.num_heads,
        top_k=top_k,
        init=init,
        init_state=init_state,
        advance=advance,
        propose=propose,
        complete=complete,
    )
