"""Lookup head: drafts by continuing earlier occurrences of the row's own last tokens (prompt lookup).

It has no parameters and works with any model. The text's suffix is searched in the text itself; the
occurrences with the longest common suffix, and among these the latest, are continued. A child of a node
is the next distinct token among the continuations that agree with the node's path, so chains copy the
best occurrence and branches follow the others.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from entmtp_jax.heads.interface import NO_TOKEN, Draft, Features, Head, Proposal, Shared
from entmtp_jax.topology import Topology
from entmtp_jax.types import Array, Bool, Int, Params, PRNGKey, RowInts

MAX_DEPTH = 16
MAX_SUFFIX = 4  # longer suffixes are not told apart: they are rare and the latest match is as good
NUM_MATCHES = 8


class LookupState(NamedTuple):
    """The row's text.

    Attributes:
      text: ``[B, X]`` int32 committed tokens and the root after them.
      length: ``[B]`` tokens in it, the root included; 0 before the prefill.
    """

    text: Int[Array, "B X"]
    length: RowInts


def build_lookup(*, max_suffix: int = MAX_SUFFIX, num_matches: int = NUM_MATCHES) -> Head:
    """The lookup head.

    Args:
      max_suffix: longest suffix that is compared, in tokens.
      num_matches: occurrences that are kept, best first; also the number of ranks.
    """

    def init(key: PRNGKey) -> Params:
        del key
        return {}

    def init_state(batch: int, slots: int) -> LookupState:
        # One more than the cache: the root is known before it is committed.
        return LookupState(text=jnp.zeros((batch, slots + 1), jnp.int32), length=jnp.zeros(batch, jnp.int32))

    def advance(
        params: Params,
        shared: Shared,
        state: LookupState,
        features: Features,
        tokens: Int[Array, "B T"],
        next_tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
    ) -> LookupState:
        del params, shared, features
        slots = jnp.arange(state.text.shape[1])
        text = state.text
        # A token at position p and the one after it; few positions per call, so a comparison beats a scatter.
        for offset, values in ((0, tokens), (1, next_tokens)):
            hit = (slots == (positions + offset)[:, :, None]) & valid[:, :, None]
            text = jnp.where(hit.any(1), jnp.sum(jnp.where(hit, values[:, :, None], 0), axis=1), text)
        length = jnp.max(jnp.where(valid, positions + 2, 0), axis=1)
        return LookupState(text=text, length=jnp.maximum(length, state.length))

    def propose(params: Params, shared: Shared, state: LookupState, root: RowInts, depth: int) -> Proposal:
        del params, shared, root
        continuations, found = continue_matches(state, depth, max_suffix=max_suffix, num_matches=num_matches)
        certain = jnp.where(found[:, :1], 0.0, -jnp.inf)  # a copied token has no probability but "as seen"
        return Proposal(chain_logprobs=jnp.repeat(certain, depth, axis=1), parts=(continuations, found))

    def complete(
        params: Params, shared: Shared, state: LookupState, root: RowInts, proposal: Proposal, topology: Topology
    ) -> Draft:
        del params, shared, state
        continuations, found = proposal.parts
        tokens = _place(continuations, found, root, topology)
        empty = (tokens == NO_TOKEN).at[:, 0].set(False)
        return Draft(tokens=tokens, logprobs=jnp.where(empty, -jnp.inf, 0.0))

    return Head(
        name="lookup",
        max_depth=MAX_DEPTH,
        top_k=num_matches,
        init=init,
        init_state=init_state,
        advance=advance,
        propose=propose,
        complete=complete,
    )


def continue_matches(
    state: LookupState, depth: int, *, max_suffix: int, num_matches: int
) -> tuple[Int[Array, "B matches depth"], Bool[Array, "B matches"]]:
    """Tokens after the best earlier occurrences of each row's suffix.

    Example: text ``a b c a b d a b`` (root the last b), depth 3. The suffix ``a b`` occurs earlier, ending
    at positions 4 and 1; the later comes first: ``[d a b]`` and ``[c a b]``. A continuation that reaches
    the end of the text goes on from the occurrence again: text ``x y x y``, suffix ``x y`` ending at 1,
    continues ``x y x y ...``.

    Returns:
      Tokens, best occurrence first, and which of the occurrences exist.
    """
    text, last = state.text, state.length - 1
    batch, slots = text.shape
    where = jnp.arange(slots)
    rows = jnp.arange(batch)[:, None]
    agreeing = jnp.ones((batch, slots), bool)
    matched = jnp.zeros((batch, slots), jnp.int32)
    for back in range(max_suffix):
        suffix_token = text[rows, jnp.maximum(last - back, 0)[:, None]]
        shifted = jnp.roll(text, back, axis=1)
        inside = (where >= back) & (last[:, None] >= back)
        agreeing = agreeing & (shifted == suffix_token) & inside
        matched = matched + agreeing
    usable = (where < last[:, None]) & (matched > 0)
    # Longer suffix first, then the later occurrence.
    score = jnp.where(usable, matched * slots + where, -1)
    best, ends = jax.lax.top_k(score, num_matches)
    period = jnp.maximum(last[:, None] - ends, 1)
    offsets = jnp.arange(depth) % period[:, :, None]
    continuations = text[rows[:, :, None], jnp.minimum(ends[:, :, None] + 1 + offsets, slots - 1)]
    return continuations, best >= 0


def _place(
    continuations: Int[Array, "B matches depth"], found: Bool[Array, "B matches"], root: RowInts, topology: Topology
) -> Int[Array, "B N"]:
    """Puts continuations on the nodes: siblings differ, children agree with their parent's path."""
    placed: dict[int, list[Array]] = {}  # tokens of each parent's children so far
    by_row = {0: (root, found)}  # token of each row, and the occurrences that continue with its path
    order = sorted(range(1, topology.num_rows), key=lambda row: (topology.depths[row], topology.ranks[row]))
    for row in order:  # lower ranks before higher ones, whatever the order of the rows
        parent = topology.parents[row]
        next_tokens = continuations[:, :, topology.depths[row] - 1]
        open_matches = by_row[parent][1]
        for sibling in placed.get(parent, []):
            open_matches = open_matches & (next_tokens != sibling[:, None])
        first = jnp.argmax(open_matches, axis=1)
        token = jnp.take_along_axis(next_tokens, first[:, None], axis=1)[:, 0]
        token = jnp.where(open_matches.any(axis=1), token, NO_TOKEN)
        by_row[row] = (token, by_row[parent][1] & (next_tokens == token[:, None]))
        placed.setdefault(parent, []).append(token)
    return jnp.stack([by_row[row][0] for row in range(topology.num_rows)], axis=1)
