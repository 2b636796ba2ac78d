"""Traces: at every position of known texts, where the true tokens stand among what a head offers.

One pass over the backbone's own texts, teacher-forced. The head is run as decoding runs it, token by token and
along the true path, so what it offers is what it would offer there; many texts go in step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.calibration.replay import Trace
from entmtp_jax.entropy import entropy_nats
from entmtp_jax.heads.interface import NO_TOKEN, Features, Head, Shared
from entmtp_jax.types import Array, Float, Int, Params

UNRANKED = 10_000  # stands for a token that is not among the candidates
TEXTS_PER_PASS = 16
LENGTH_STEP = 64  # texts are padded to a multiple, so that few programs are compiled
POSITIONS_PER_PASS = 256  # of the entropies


class KnownText(NamedTuple):
    """A text that the backbone wrote.

    Attributes:
      tokens: ``[n]`` prompt and answer.
      prompt_length: the first so many tokens are the prompt.
      hidden: ``[n, D]`` final normed hidden states, any float type.
    """

    tokens: Int[np.ndarray, " n"]
    prompt_length: int
    hidden: Float[np.ndarray, "n D"]


def trace_texts(
    head: Head,
    params: Params,
    shared: Shared,
    unembed: Callable[[Array], Array],
    texts: Sequence[KnownText],
    *,
    depth: int,
) -> Trace:
    """Ranks and entropies at every position of the texts from which something is left to draft.

    These are the positions from the prompt's last on, up to the last but two of the text; the texts come in
    the order given.

    Args:
      head: drafts.
      params: its parameters.
      shared: the backbone's matrices.
      unembed: ``normed[n, D] -> logits[n, V]`` of the backbone.
      texts: what to look at.
      depth: K, levels to look at; at most the head's.
    """
    run = build_rank_pass(head, depth)
    ranks: list[np.ndarray] = [np.zeros((0, depth), np.int32)] * len(texts)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
    for start in range(0, len(order), TEXTS_PER_PASS):
        members = order[start : start + TEXTS_PER_PASS]
        found = run(params, shared, *_padded([texts[index] for index in members], depth))
        for row, index in enumerate(members):
            ranks[index] = np.asarray(found[row, _places(texts[index])])
    hidden = np.concatenate([text.hidden[_places(text)] for text in texts])
    return Trace(
        ranks=np.concatenate(ranks),
        entropy_nats=entropies(unembed, hidden),
        text=np.repeat(np.arange(len(texts)), [len(part) for part in ranks]),
    )


def build_rank_pass(head: Head, depth: int) -> Callable[..., Int[Array, "B L K"]]:
    """``(params, shared, hidden[B, L, D], tokens[B, L + K + 1], length[B]) -> ranks[B, L, K]``, compiled.

    Entry t holds the ranks of the tokens at t+2 .. t+1+K among what the head offers after position t.
    """

    @jax.jit
    def rank_pass(
        params: Params,
        shared: Shared,
        hidden: Float[Array, "B L D"],
        tokens: Int[Array, "B places"],
        length: Int[Array, " B"],
    ) -> Int[Array, "B L K"]:
        batch, places = hidden.shape[:2]

        def one_place(state: object, t: Int[Array, ""]) -> tuple[object, Array]:
            window = jax.lax.dynamic_slice_in_dim(tokens, t, depth + 2, axis=1)
            here = jax.lax.dynamic_slice_in_dim(hidden, t, 1, axis=1).astype(jnp.float32)
            positions = jnp.full((batch, 1), t, jnp.int32)
            state = head.advance(
                params,
                shared,
                state,
                Features(here, here, ()),
                window[:, :1],
                window[:, 1:2],
                positions,
                positions < length[:, None] - 1,
            )
            path = window[:, 2:]
            offered = head.follow(params, shared, state, window[:, 1], path)
            hit = (offered.tokens == path[:, :, None]) & (path >= 0)[:, :, None]
            return state, jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), UNRANKED)

        state = head.init_state(batch, places + depth + 1)
        _, ranks = jax.lax.scan(one_place, state, jnp.arange(places))
        return ranks.transpose(1, 0, 2)

    return rank_pass


def entropies(unembed: Callable[[Array], Array], hidden: Float[np.ndarray, "n D"]) -> Float[np.ndarray, " n"]:
    """Entropy in nats of the backbone's next-token distribution at every hidden state."""
    one_pass = jax.jit(lambda states: entropy_nats(unembed(states.astype(jnp.float32))))
    padded = np.pad(hidden, ((0, -len(hidden) % POSITIONS_PER_PASS), (0, 0)))
    starts = range(0, len(padded), POSITIONS_PER_PASS)
    found = [np.asarray(one_pass(jnp.asarray(padded[s : s + POSITIONS_PER_PASS]))) for s in starts]
    return np.concatenate(found)[: len(hidden)]


def _places(text: KnownText) -> slice:
    return slice(max(text.prompt_length - 1, 0), max(len(text.tokens) - 2, 0))


def _padded(texts: Sequence[KnownText], depth: int) -> tuple[Array, Array, Array]:
    longest = max(len(text.tokens) for text in texts)
    places = -(-longest // LENGTH_STEP) * LENGTH_STEP
    hidden = np.zeros((TEXTS_PER_PASS, places, texts[0].hidden.shape[1]), texts[0].hidden.dtype)
    tokens = np.full((TEXTS_PER_PASS, places + depth + 1), NO_TOKEN, np.int32)
    length = np.zeros(TEXTS_PER_PASS, np.int32)
    for row, text in enumerate(texts):
        count = len(text.tokens)
        hidden[row, :count], tokens[row, :count], length[row] = text.hidden, text.tokens, count
    return jnp.asarray(hidden), jnp.asarray(tokens), jnp.asarray(length)
