"""A head with known behaviour, for tests: it replays a given text instead of predicting one.

The text and the rank at which its tokens are offered are the head's parameters, so one compiled program
serves an oracle (always right), an adversary (never right) and anything between.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from entmtp_jax.heads.candidates import NO_TOKEN, Candidates
from entmtp_jax.heads.interface import Features, Head, Shared
from entmtp_jax.heads.levels import Level
from entmtp_jax.types import Array, Bool, Int, Params, PRNGKey, RowInts

ALWAYS = 0  # rank of the true token: an oracle
NEVER = -1  # at no rank: an adversary
NOTHING = -2  # no candidate at all


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
    """A head that offers the true token at a known rank and wrong, different tokens at the others, or nothing."""

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

    def candidates(params: Params, state: ReplayState, depth: int, count: int) -> Candidates:
        """The same below each of ``count`` nodes of a depth."""
        text, true_rank = params["text"], params["true_rank"]
        inside = jnp.minimum(state.position + depth + 1, text.shape[1] - 1)[:, None]
        true = jnp.take_along_axis(text, inside, axis=1)
        ranked = (true + jnp.arange(top_k) - true_rank[inside]) % vocab_size
        offered = jnp.where(true_rank[inside] == NOTHING, NO_TOKEN, ranked)
        tokens = jnp.broadcast_to(offered[:, None], (len(text), count, top_k))
        return Candidates(tokens, jnp.where(tokens == NO_TOKEN, -jnp.inf, 0.0))

    def start(params: Params, shared: Shared, state: ReplayState, root: RowInts, depth: int) -> tuple[Candidates, None]:
        del shared, root, depth
        return candidates(params, state, 0, 1), None

    def expand(
        params: Params, shared: Shared, state: ReplayState, carry: None, level: Level, tokens: Int[Array, "B P"]
    ) -> tuple[Candidates, None]:
        del shared, carry
        return candidates(params, state, level.depth, tokens.shape[1]), None

    def init(key: PRNGKey) -> Params:
        del key
        return replay_params([[0]], ALWAYS, slots=1)

    return Head("replay", max_depth, top_k, init, init_state, advance, start, expand)
