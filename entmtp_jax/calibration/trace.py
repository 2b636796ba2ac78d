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
from entmtp_jax.heads.interface import NO_TOKEN, Features, Head, Shared
from entmtp_jax.report.stats import outside_loops
from entmtp_jax.state import root_stats
from entmtp_jax.types import Array, Float, Int, Params

UNRANKED = 10_000  # stands for a token that is not among the candidates
TEXTS_PER_PASS = 16
LENGTH_STEP = 64  # texts are padded to a multiple, so that few programs are compiled
POSITIONS_PER_PASS = 256  # of the roots' distributions


class KnownText(NamedTuple):
    """A text that the backbone wrote.

    Attributes:
      tokens: ``[n]`` prompt and answer.
      prompt_length: the first so many tokens are the prompt.
      normed: ``[n, D]`` hidden states after the final norm, any float type.
      hidden: ``[n, D]`` before it; None says that the head reads the normed ones only, as most do.
    """

    tokens: Int[np.ndarray, " n"]
    prompt_length: int
    normed: Float[np.ndarray, "n D"]
    hidden: Float[np.ndarray, "n D"] | None = None

    @property
    def answer(self) -> Int[np.ndarray, " m"]:
        """New tokens; a text without a prompt begins with one that is given."""
        return self.tokens[max(self.prompt_length, 1) :]

    @property
    def places(self) -> slice:
        """Places at which a step can start: from the prompt's last token up to the last but two of the text."""
        return slice(max(self.prompt_length, 1) - 1, max(len(self.tokens) - 2, 0))


class Roots(NamedTuple):
    """Of the distributions from which tokens were taken.

    Attributes:
      entropy_nats: ``[n]``.
      top1_prob: ``[n]``.
      best: ``[n]`` the most probable token.
    """

    entropy_nats: Float[np.ndarray, " n"]
    top1_prob: Float[np.ndarray, " n"]
    best: Int[np.ndarray, " n"]


def trace_texts(
    head: Head,
    params: Params,
    shared: Shared,
    unembed: Callable[[Array], Array],
    texts: Sequence[KnownText],
    *,
    depth: int,
) -> Trace:
    """Ranks and signals at every position of the texts at which a step can start; the texts in the order given.

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
    logprobs: list[np.ndarray] = [np.zeros((0, depth), np.float32)] * len(texts)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
    for start in range(0, len(order), TEXTS_PER_PASS):
        members = order[start : start + TEXTS_PER_PASS]
        found = [np.asarray(x) for x in run(params, shared, *_padded([texts[index] for index in members], depth))]
        for row, index in enumerate(members):
            ranks[index], logprobs[index] = (x[row, texts[index].places] for x in found)
    roots = look_at_roots(unembed, np.concatenate([text.normed[text.places] for text in texts]))
    # A step's root is the answer's token before the first that it emits.
    taken = np.concatenate([text.answer[:-1] for text in texts])
    return Trace(
        ranks=np.concatenate(ranks),
        chain_logprobs=np.concatenate(logprobs),
        entropy_nats=roots.entropy_nats,
        top1_prob=roots.top1_prob,
        outside_loops=np.concatenate([outside_loops(text.answer.tolist())[1:] for text in texts]),
        agrees=roots.best == taken,
        new_tokens=np.asarray([len(text.answer) for text in texts], np.int32),
    )


def build_rank_pass(head: Head, depth: int) -> Callable[..., tuple[Array, Array]]:
    """``(params, shared, features[B, L], tokens[B, L + K + 1], length[B]) -> (ranks, logprobs)[B, L, K]``, compiled.

    Entry t holds the ranks of the tokens at t+2 .. t+1+K among what the head offers after position t, and the
    log-probabilities of its greedy chain there.
    """

    @jax.jit
    def rank_pass(
        params: Params,
        shared: Shared,
        features: Features,
        tokens: Int[Array, "B places"],
        length: Int[Array, " B"],
    ) -> tuple[Int[Array, "B L K"], Float[Array, "B L K"]]:
        batch, places = features.normed.shape[:2]

        def one_place(state: object, t: Int[Array, ""]) -> tuple[object, tuple[Array, Array]]:
            window = jax.lax.dynamic_slice_in_dim(tokens, t, depth + 2, axis=1)
            here = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1).astype(jnp.float32), features)
            positions = jnp.full((batch, 1), t, jnp.int32)
            state = head.advance(
                params,
                shared,
                state,
                here,
                window[:, :1],
                window[:, 1:2],
                positions,
                positions < length[:, None] - 1,
            )
            root, path = window[:, 1], window[:, 2:]
            offered = head.follow(params, shared, state, root, path)
            hit = (offered.tokens == path[:, :, None]) & (path >= 0)[:, :, None]
            ranks = jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), UNRANKED)
            return state, (ranks, head.propose(params, shared, state, root, depth).chain_logprobs)

        state = head.init_state(batch, places + depth + 1)
        _, (ranks, logprobs) = jax.lax.scan(one_place, state, jnp.arange(places))
        return ranks.transpose(1, 0, 2), logprobs.transpose(1, 0, 2)

    return rank_pass


def look_at_roots(unembed: Callable[[Array], Array], hidden: Float[np.ndarray, "n D"]) -> Roots:
    """What the backbone's next-token distribution is like at every hidden state."""

    @jax.jit
    def one_pass(states: Float[Array, "n D"]) -> tuple[Array, ...]:
        logits = unembed(states.astype(jnp.float32))
        return *root_stats(logits), jnp.argmax(logits, axis=-1)

    passes = max(-(-len(hidden) // POSITIONS_PER_PASS), 1)
    padded = np.pad(hidden, ((0, passes * POSITIONS_PER_PASS - len(hidden)), (0, 0)))
    starts = range(0, len(padded), POSITIONS_PER_PASS)
    found = [one_pass(jnp.asarray(padded[start : start + POSITIONS_PER_PASS])) for start in starts]
    return Roots(*(np.concatenate([np.asarray(x) for x in parts])[: len(hidden)] for parts in zip(*found, strict=True)))


def _padded(texts: Sequence[KnownText], depth: int) -> tuple[Features, Array, Array]:
    longest = max(len(text.tokens) for text in texts)
    places = -(-longest // LENGTH_STEP) * LENGTH_STEP
    tokens = np.full((TEXTS_PER_PASS, places + depth + 1), NO_TOKEN, np.int32)
    length = np.zeros(TEXTS_PER_PASS, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)], length[row] = text.tokens, len(text.tokens)
    normed = _stacked([text.normed for text in texts], places)
    hidden = _stacked([text.normed if text.hidden is None else text.hidden for text in texts], places)
    return Features(hidden, normed, ()), jnp.asarray(tokens), jnp.asarray(length)


def _stacked(states: Sequence[np.ndarray], places: int) -> Float[Array, "B L D"]:
    rows = np.zeros((TEXTS_PER_PASS, places, states[0].shape[1]), states[0].dtype)
    for row, values in zip(rows, states, strict=False):
        row[: len(values)] = values
    return jnp.asarray(rows)
