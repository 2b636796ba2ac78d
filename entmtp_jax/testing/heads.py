"""A head with known behaviour, for tests: it replays a given text instead of predicting one.

The text and the rank at which its tokens are offered are the head's parameters, so one compiled program
serves an oracle (always right), an adversary (never right) and anything between.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from entmtp_jax.heads.interface import Draft, Features, Head, Proposal, Shared
from entmtp_jax.topology import Topology
from entmtp_jax.types import Array, Bool, Int, Params, PRNGKey, RowInts

ALWAYS = 0  # rank of the true token: an oracle
NEVER = -1  # at no rank: an adversary


def replay_params(texts: Sequence[Sequence[int]], true_rank: np.ndarray | int, *, slots: int) -> Params:
    """Parameters of ``replay_head``.

    Args:
      texts: per row, the token of every absolute position: the prompt and its plain continuation.
      true_rank: at which rank the true token of a position stands: ``[slots]``, or one number for all.
      slots: length to which the texts are padded.
    """
    text = np.zeros((len(texts), slots), np.int32)
    for row, tokens in enumerate(texts):
        text[row, : len(tokens)] = tokens
    return {"text": jnp.asarray(text), "true_rank": jnp.asarray(np.broadcast_to(true_rank, (slots,)), jnp.int32)}


class ReplayState(NamedTuple):
    """Where the text is.

    Attributes:
      position: ``[B]`` of the root.
    """

    position: RowInts


def replay_head(*, vocab_size: int, max_depth: int = 8, top_k: int = 16) -> Head:
    """A head that offers the true token at a known rank and wrong, different tokens at the others."""

    def init_state(batch: int, slots: int) -> ReplayState:
        del slots
        return ReplayState(position=jnp.zeros(batch, jnp.int32))

    def advance(
        params: Params,
        shared: Shared,
        state: ReplayState,
        features: Features,
        tokens: Int[Array, "B T"],
        next_tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
    ) -> ReplayState:
        del params, shared, features, tokens, next_tokens
        root = jnp.max(jnp.where(valid, positions + 1, 0), axis=1)
        return ReplayState(position=jnp.maximum(state.position, root))

    def propose(params: Params, shared: Shared, state: ReplayState, root: RowInts, depth: int) -> Proposal:
        del params, shared, state
        return Proposal(chain_logprobs=jnp.zeros((root.shape[0], depth)), parts=None)

    def complete(
        params: Params, shared: Shared, state: ReplayState, root: RowInts, proposal: Proposal, topology: Topology
    ) -> Draft:
        del shared, proposal
        text, true_rank = params["text"], params["true_rank"]
        columns = [root]
        for depth, rank in zip(topology.depths[1:], topology.ranks[1:], strict=True):
            position = state.position + depth
            inside = jnp.minimum(position, text.shape[1] - 1)
            true = jnp.take_along_axis(text, inside[:, None], axis=1)[:, 0]
            columns.append((true + rank - true_rank[inside]) % vocab_size)
        tokens = jnp.stack(columns, axis=1)
        return Draft(tokens=tokens, logprobs=jnp.zeros(tokens.shape))

    def init(key: PRNGKey) -> Params:
        del key
        return replay_params([[0]], ALWAYS, slots=1)

    return Head("replay", max_depth, top_k, init, init_state, advance, propose, complete)
