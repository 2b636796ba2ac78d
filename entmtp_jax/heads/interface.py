"""What decoding asks of a drafting head; every kind is one file that builds this NamedTuple."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entmtp_jax.heads.candidates import NO_TOKEN, Candidates, Draft
from entmtp_jax.heads.levels import Level, draft_levels, follow_path, on_greedy_chain, pick_from_chain
from entmtp_jax.topology import Topology
from entmtp_jax.types import Array, Bool, Float, Int, Params, PRNGKey, RowInts

__all__ = ["NO_TOKEN", "Candidates", "Draft", "Features", "Head", "Level", "Proposal", "Shared", "last_valid"]


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
      greedy: ``[B, depth, R]`` candidates at every depth of that chain.
      carry: of the head's ``start``.
    """

    chain_logprobs: Float[Array, "B depth"]
    greedy: Candidates
    carry: Any


class Head(NamedTuple):
    """A drafting head as pure functions.

    A head says what it offers after the root (``start``) and below drafted nodes (``expand``); trees, greedy
    chains and given paths are all made of these two. Every topology, depth 0 included, advances the head's
    state, so that drafting can be resumed at any step.

    Attributes:
      name: kind, for messages and reports.
      max_depth: K, tokens that it can draft along a path.
      top_k: R, candidates that it ranks below one parent.
      init: ``key -> params``.
      init_state: ``(batch, slots) -> state``; every array of the state has B first.
      advance: ``(params, shared, state, features, tokens, next_tokens, positions, valid) -> state``:
        takes in committed tokens ``[B, T]``; ``next_tokens`` holds the token after each (the last valid
        one is the new root); ``valid`` is True for a prefix of every row, possibly an empty one.
      start: ``(params, shared, state, root, depth) -> (candidates[B, 1, R], carry)``: what it offers after the
        root; ``depth`` is static, the deepest that will be drafted.
      expand: ``(params, shared, state, carry, level, tokens[B, P]) -> (candidates[B, P, R], carry)``: what it
        offers below the P live nodes of a level of depth 1 or more, which hold ``tokens``.
    """

    name: str
    max_depth: int
    top_k: int
    init: Callable[[PRNGKey], Params]
    init_state: Callable[[int, int], Any]
    advance: Callable[..., Any]
    start: Callable[[Params, Shared, Any, RowInts, int], tuple[Candidates, Any]]
    expand: Callable[[Params, Shared, Any, Any, Level, Array], tuple[Candidates, Any]]

    def propose(self, params: Params, shared: Shared, state: Any, root: RowInts, depth: int) -> Proposal:
        """Drafts the greedy chain, every level with all its candidates.

        Args:
          params: of the head.
          shared: the backbone's matrices.
          state: of the head.
          root: ``[B]`` the decided token.
          depth: static, 1 or more.
        """
        first, carry = self.start(params, shared, state, root, depth)
        expand = functools.partial(self.expand, params, shared, state)
        greedy = follow_path(depth, first, carry, expand, None)
        return Proposal(greedy.logprobs[:, :, 0], greedy, carry)

    def complete(
        self, params: Params, shared: Shared, state: Any, root: RowInts, proposal: Proposal, topology: Topology
    ) -> Draft:
        """Tokens on the nodes of a topology.

        Args:
          params: of the head.
          shared: the backbone's matrices.
          state: as it was when the proposal was made.
          root: ``[B]`` the decided token.
          proposal: at least as deep as the topology.
          topology: of depth 1 or more.
        """
        if on_greedy_chain(topology):
            return pick_from_chain(topology, root, proposal.greedy)
        first = jax.tree.map(lambda levels: levels[:, :1], proposal.greedy)
        expand = functools.partial(self.expand, params, shared, state)
        return draft_levels(topology, root, first, proposal.carry, expand)

    def follow(
        self, params: Params, shared: Shared, state: Any, root: RowInts, tokens: Int[Array, "B depth"]
    ) -> Candidates:
        """What the head offers at every depth of a given path below the root, ``[B, depth, R]``.

        ``complete`` places exactly these candidates below the nodes of such a path; traces are made of them.

        Args:
          params: of the head.
          shared: the backbone's matrices.
          state: of the head.
          root: ``[B]`` the decided token.
          tokens: of the path's nodes; the last one is not looked at.
        """
        depth = tokens.shape[1]
        first, carry = self.start(params, shared, state, root, depth)
        return follow_path(depth, first, carry, functools.partial(self.expand, params, shared, state), tokens)


def last_valid(values: Float[Array, "B T D"], valid: Bool[Array, "B T"], otherwise: Float[Array, "B D"]) -> Array:
    """The value at each row's last valid token; ``otherwise`` for a row that has none."""
    count = valid.sum(axis=1)
    index = (count - 1).clip(0)[:, None, None]
    picked = jnp.take_along_axis(values, index, axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, picked, otherwise)
