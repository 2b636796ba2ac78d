"""Hybrid drafts: one tree in which one head's best guess comes first and another head fills the rest.

Wherever the first head has a candidate, it takes rank 0, and the second head's candidates take the ranks
after it. Made for lookup before a trained head: where the text repeats itself, rank 0 of every level copies,
and the other ranks, and every node where nothing is copied, are the trained head's. Drafts are verified, so
what is mixed and how never changes the text.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entmtp_jax.heads.candidates import NO_TOKEN, Candidates
from entmtp_jax.heads.interface import Features, Head, Shared
from entmtp_jax.heads.levels import Level
from entmtp_jax.types import Array, Bool, Int, PRNGKey, RowInts


class Pair(NamedTuple):
    """Parameters, states or what is carried along of the two heads."""

    first: Any
    second: Any


def build_hybrid(first: Head, second: Head) -> Head:
    """Two heads as one; its parameters and states are ``Pair`` s of theirs.

    It drafts as deep as both can, and ranks as many candidates as the second head.

    Args:
      first: its best candidate takes rank 0 wherever there is one.
      second: fills the other ranks, and all of them where the first head has nothing to offer.
    """
    heads = Pair(first, second)
    return Head(
        name=f"{first.name}+{second.name}",
        max_depth=min(first.max_depth, second.max_depth),
        top_k=second.top_k,
        init=functools.partial(_init, heads),
        init_state=functools.partial(_init_state, heads),
        advance=functools.partial(_advance, heads),
        start=functools.partial(_start, heads),
        expand=functools.partial(_expand, heads),
    )


def put_first(best: Candidates, others: Candidates) -> Candidates:
    """The best candidate of one head, then those of the other without it; as many as the other has.

    Example: best ``[d]``, others ``[a, d, b, c]`` give ``[d, a, b, c]``; best ``[x]`` gives ``[x, a, d, b]``;
    no best candidate gives the others as they are.

    Args:
      best: of which rank 0 is used.
      others: of R ranks, different ids.
    """
    token, logprob = best.tokens[:, :, :1], best.logprobs[:, :, :1]
    exists = token != NO_TOKEN
    ranks = jnp.arange(others.tokens.shape[-1])
    same = others.tokens == token
    # Where the token stands among the others; ranks up to there move back by one, the last falls out if it is new.
    place = jnp.where(same.any(-1), jnp.argmax(same, axis=-1), len(ranks))[:, :, None]
    source = jnp.where(exists & (ranks <= place), ranks - 1, ranks)
    copied = exists & (ranks == 0)

    def reorder(one: Array, many: Array) -> Array:
        moved = jnp.take_along_axis(many, jnp.maximum(source, 0), axis=-1)
        return jnp.where(copied, one, moved)

    return Candidates(reorder(token, others.tokens), reorder(logprob, others.logprobs))


def _init(heads: Pair, key: PRNGKey) -> Pair:
    keys = jax.random.split(key)
    return Pair(heads.first.init(keys[0]), heads.second.init(keys[1]))


def _init_state(heads: Pair, batch: int, slots: int) -> Pair:
    return Pair(heads.first.init_state(batch, slots), heads.second.init_state(batch, slots))


def _advance(
    heads: Pair,
    params: Pair,
    shared: Shared,
    state: Pair,
    features: Features,
    tokens: Int[Array, "B T"],
    next_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Pair:
    arguments = (features, tokens, next_tokens, positions, valid)
    return Pair(
        heads.first.advance(params.first, shared, state.first, *arguments),
        heads.second.advance(params.second, shared, state.second, *arguments),
    )


def _start(
    heads: Pair, params: Pair, shared: Shared, state: Pair, root: RowInts, depth: int
) -> tuple[Candidates, Pair]:
    best, first = heads.first.start(params.first, shared, state.first, root, depth)
    others, second = heads.second.start(params.second, shared, state.second, root, depth)
    return put_first(best, others), Pair(first, second)


def _expand(
    heads: Pair, params: Pair, shared: Shared, state: Pair, carry: Pair, level: Level, tokens: Int[Array, "B P"]
) -> tuple[Candidates, Pair]:
    best, first = heads.first.expand(params.first, shared, state.first, carry.first, level, tokens)
    others, second = heads.second.expand(params.second, shared, state.second, carry.second, level, tokens)
    return put_first(best, others), Pair(first, second)
