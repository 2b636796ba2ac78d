"""Lookup head: drafts by continuing earlier occurrences of the row's own last tokens (prompt lookup).

It has no parameters and works with any model. The text's suffix is searched in the text itself; the
occurrences with the longest common suffix, and among these the latest, are continued. A child of a node
is the next distinct token among the continuations that agree with the node's path, so chains copy the
best occurrence and branches follow the others.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from entmtp_jax.errors import UserError
from entmtp_jax.heads.candidates import NO_TOKEN, Candidates
from entmtp_jax.heads.interface import Features, Head, Shared
from entmtp_jax.heads.levels import Level
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


class _Matches(NamedTuple):
    """Occurrences that are continued, and which of them agree with the path to each live node."""

    continuations: Int[Array, "B matches depth"]
    agreeing: Bool[Array, "B P matches"]


def build_lookup(*, min_suffix: int = 1, max_suffix: int = MAX_SUFFIX, num_matches: int = NUM_MATCHES) -> Head:
    """The lookup head.

    Args:
      min_suffix: shortest suffix whose occurrences are continued, in tokens; a short one occurs by chance.
      max_suffix: longest suffix that is compared, in tokens.
      num_matches: occurrences that are kept, best first; also the number of ranks.
    """
    if not 1 <= min_suffix <= max_suffix:
        raise UserError(f"the shortest suffix must have 1 to {max_suffix} tokens (the longest); got {min_suffix}")
    find = functools.partial(continue_matches, min_suffix=min_suffix, max_suffix=max_suffix, num_matches=num_matches)
    return Head(
        name="lookup",
        max_depth=MAX_DEPTH,
        top_k=num_matches,
        init=_init,
        init_state=_init_state,
        advance=_advance,
        start=functools.partial(_start, find),
        expand=_expand,
    )


def _init(key: PRNGKey) -> Params:
    del key
    return {}


def _init_state(batch: int, slots: int) -> LookupState:
    # One more than the cache: the root is known before it is committed.
    return LookupState(text=jnp.zeros((batch, slots + 1), jnp.int32), length=jnp.zeros(batch, jnp.int32))


def _advance(
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


def _start(
    find: Callable[[LookupState, int], tuple[Array, Array]],
    params: Params,
    shared: Shared,
    state: LookupState,
    root: RowInts,
    depth: int,
) -> tuple[Candidates, _Matches]:
    del params, shared, root  # the text ends with the root
    continuations, found = find(state, depth)
    return distinct(continuations[:, :, 0], found[:, None]), _Matches(continuations, found[:, None])


def _expand(
    params: Params, shared: Shared, state: LookupState, matches: _Matches, level: Level, tokens: Int[Array, "B P"]
) -> tuple[Candidates, _Matches]:
    del params, shared, state
    continuations = matches.continuations
    here = continuations[:, None, :, level.depth - 1] == tokens[:, :, None]
    agreeing = matches.agreeing[:, level.sources] & here
    return distinct(continuations[:, :, level.depth], agreeing), _Matches(continuations, agreeing)


def continue_matches(
    state: LookupState, depth: int, *, min_suffix: int, max_suffix: int, num_matches: int
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
    usable = (where < last[:, None]) & (matched >= min_suffix)
    # Longer suffix first, then the later occurrence.
    score = jnp.where(usable, matched * slots + where, -1)
    best, ends = jax.lax.top_k(score, num_matches)
    period = jnp.maximum(last[:, None] - ends, 1)
    offsets = jnp.arange(depth) % period[:, :, None]
    continuations = text[rows[:, :, None], jnp.minimum(ends[:, :, None] + 1 + offsets, slots - 1)]
    return continuations, best >= 0


def distinct(next_tokens: Int[Array, "B matches"], agreeing: Bool[Array, "B P matches"]) -> Candidates:
    """The different next tokens of the occurrences that agree with each node, in the order of the occurrences.

    A copied token has no probability but "as seen": its log-probability is 0.

    Example: next tokens ``[c, d, c, x]``; a node with which all but the second agree gets ``[c, x, NO_TOKEN,
    NO_TOKEN]``.
    """
    matches = next_tokens.shape[1]
    same = next_tokens[:, :, None] == next_tokens[:, None, :]
    earlier = jnp.tril(jnp.ones((matches, matches), bool), -1)
    repeated = (same & earlier)[:, None] & agreeing[:, :, None, :]
    kept = agreeing & ~repeated.any(-1)
    place = jnp.cumsum(kept, axis=-1) - 1
    chosen = kept[:, :, None, :] & (place[:, :, None, :] == jnp.arange(matches)[:, None])
    tokens = jnp.where(chosen, next_tokens[:, None, None], 0).sum(axis=-1)
    exists = chosen.any(axis=-1)
    return Candidates(jnp.where(exists, tokens, NO_TOKEN), jnp.where(exists, 0.0, -jnp.inf))
