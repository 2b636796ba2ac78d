"""What decoding asks of a drafting head; every kind is one file that builds this NamedTuple."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from entmtp_jax.topology import Topology
from entmtp_jax.types import Array, Bool, Float, Int, Params, PRNGKey, RowInts

NO_TOKEN = -1  # an empty node: it is never right


class Shared(NamedTuple):
    """The backbone's matrices that a head may read; arguments of every call, never copied into the head.

    Attributes:
      embedding: ``[V, D]``.
      output: ``[V, D]`` output matrix (the embedding when tied).
    """

    embedding: Float[Array, "V D"]
    output: Float[Array, "V D"]


class Features(NamedTuple):
    """Hidden states of committed tokens, as the backbone returned them.

    Attributes:
      hidden: ``[B, T, D]`` before the final norm.
      normed: ``[B, T, D]`` after it.
      taps: chosen layers' inputs, each ``[B, T, D]``.
    """

    hidden: Float[Array, "B T D"]
    normed: Float[Array, "B T D"]
    taps: tuple[Float[Array, "B T D"], ...]


class Proposal(NamedTuple):
    """The part of a draft that does not depend on the topology.

    Attributes:
      chain_logprobs: ``[B, depth]`` log-probability that the head gives to each token of its greedy chain.
      parts: whatever the head's ``complete`` needs.
    """

    chain_logprobs: Float[Array, "B depth"]
    parts: Any


class Draft(NamedTuple):
    """Tokens on the nodes of one topology.

    Attributes:
      tokens: ``[B, N]``; row 0 is the root; ``NO_TOKEN`` marks an empty node.
      logprobs: ``[B, N]`` the head's log-probability of each node given its parent; 0 for the root.
    """

    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]


class Head(NamedTuple):
    """A drafting head as pure functions.

    Every topology, depth 0 included, advances the head's state, so that drafting can be resumed at any step.

    Attributes:
      name: kind, for messages and reports.
      max_depth: K, tokens that it can draft along a path.
      top_k: R, candidates that it ranks below one parent.
      init: ``key -> params``.
      init_state: ``(batch, slots) -> state``; every array of the state has B first.
      advance: ``(params, shared, state, features, tokens, next_tokens, positions, valid) -> state``:
        takes in committed tokens ``[B, T]``; ``next_tokens`` holds the token after each (the last valid
        one is the new root); ``valid`` is True for a prefix of every row, possibly an empty one.
      propose: ``(params, shared, state, root, depth) -> Proposal`` with static ``depth >= 1``.
      complete: ``(params, shared, state, root, proposal, topology) -> Draft``; the proposal is at least as
        deep as the topology.
    """

    name: str
    max_depth: int
    top_k: int
    init: Callable[[PRNGKey], Params]
    init_state: Callable[[int, int], Any]
    advance: Callable[..., Any]
    propose: Callable[[Params, Shared, Any, RowInts, int], Proposal]
    complete: Callable[[Params, Shared, Any, RowInts, Proposal, Topology], Draft]


def last_valid(values: Float[Array, "B T D"], valid: Bool[Array, "B T"], otherwise: Float[Array, "B D"]) -> Array:
    """The value at each row's last valid token; ``otherwise`` for a row that has none."""
    count = valid.sum(axis=1)
    index = (count - 1).clip(0)[:, None, None]
    picked = jnp.take_along_axis(values, index, axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, picked, otherwise)
