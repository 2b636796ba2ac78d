"""Heads with known behaviour, for tests: they replay a given text instead of predicting one.

The text is the head's parameter, ``[B, X]`` token ids by absolute position, so one compiled program
serves every text.
"""

from typing import Callable, NamedTuple

import jax.numpy as jnp

from entmtp_jax.heads.interface import Draft, Features, Head, Proposal, Shared
from entmtp_jax.topology import Topology
from entmtp_jax.types import Array, Bool, Int, Params, PRNGKey, RowInts

# (position of the drafted token [B], rank, true token [B], vocabulary) -> drafted token [B]
Guess = Callable[[RowInts, int, RowInts, int], RowInts]


class ReplayState(NamedTuple):
    """Attributes:
    position: ``[B]`` of the root.
    """

    position: RowInts


def replay_head(guess: Guess, *, vocab_size: int, max_depth: int = 8, top_k: int = 16) -> Head:
    """A head that knows the text and drafts what ``guess`` makes of it."""

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
        text = params["text"]
        columns = [root]
        for depth, rank in zip(topology.depths[1:], topology.ranks[1:]):
            position = state.position + depth
            inside = jnp.minimum(position, text.shape[1] - 1)
            true = jnp.take_along_axis(text, inside[:, None], axis=1)[:, 0]
            columns.append(guess(position, rank, true, vocab_size))
        tokens = jnp.stack(columns, axis=1)
        return Draft(tokens=tokens, logprobs=jnp.zeros(tokens.shape))

    def init(key: PRNGKey) -> Params:
        del key
        return {"text": jnp.zeros((1, 1), jnp.int32)}

    return Head("replay", max_depth, top_k, init, init_state, advance, propose, complete)


def oracle(position: RowInts, rank: int, true: RowInts, vocab_size: int) -> RowInts:
    """Rank 0 is always right, the other ranks are wrong and differ: acceptance is 100 %."""
    del position
    return (true + rank) % vocab_size


def adversary(position: RowInts, rank: int, true: RowInts, vocab_size: int) -> RowInts:
    """Every rank is wrong: nothing is ever accepted."""
    del position
    return (true + 1 + rank) % vocab_size


def right_at_rank(position: RowInts, rank: int, true: RowInts, vocab_size: int) -> RowInts:
    """A noisy oracle: the true token stands at a rank 0 .. 3 that depends on the position."""
    return (true + rank - hidden_rank(position)) % vocab_size


def hidden_rank(position: Array) -> Array:
    """Where ``right_at_rank`` puts the true token: a fixed hash of the position to 0 .. 3."""
    return (position * 7919 + position // 3) % 4
