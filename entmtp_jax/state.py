"""The decoding state: arrays only, every field per row, and the two ways in which it changes."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.cache import KVCache
from entmtp_jax.entropy import Average, corrected, empty_average, entropy_nats
from entmtp_jax.errors import UserError
from entmtp_jax.scheduler import NUM_SIGNALS, Signal
from entmtp_jax.trace import Trace, empty_trace
from entmtp_jax.types import Array, Float, Int, RowFloats, RowInts

MAX_EOS_IDS = 8
NO_EOS = -1


class Finish(IntEnum):
    """Why a row stopped. EOS wins when several reasons meet."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2  # max_new_tokens reached
    CACHE = 3  # no slot left for the next token
    NONFINITE = 4  # the backbone's logits hold NaN or infinity, so its text means nothing


class RootStats(NamedTuple):
    """Of the distribution that the current root was taken from.

    Attributes:
      entropy_nats: ``[B]``.
      top1_prob: ``[B]``.
    """

    entropy_nats: RowFloats
    top1_prob: RowFloats


def root_stats(logits: Float[Array, "B V"]) -> RootStats:
    """Measures the distribution from which the next root is taken."""
    return RootStats(entropy_nats=entropy_nats(logits), top1_prob=jax.nn.softmax(logits, axis=-1).max(axis=-1))


class DecodeState(NamedTuple):
    """Everything that a step reads and writes.

    The last token of the text is the *root*: emitted, but not yet in the cache. So ``text_length - 1``
    slots of the cache are committed.

    Attributes:
      tokens: ``[B, X]`` prompt and emitted tokens; entries from ``text_length`` on hold nothing of value.
      prompt_length: ``[B]``.
      text_length: ``[B]`` tokens known, the root included; equals ``prompt_length`` before the prefill.
      limit: ``[B]`` text length at which the row stops.
      max_new_tokens: ``[B]`` what was asked for; tells LENGTH from CACHE.
      eos_ids: ``[B, MAX_EOS_IDS]`` padded with ``NO_EOS``.
      finish: ``[B]`` a ``Finish``.
      seed: ``[B]`` of the row's noise.
      root_stats: distribution of the current root.
      entropy_average: one update per live step; the prefill makes the first.
      accepted_average: accepted lengths of live steps that drafted (topologies of depth 1 and more).
      topology: ``[B]`` index used in the last step.
      steps: ``[B]`` steps while the row was live; the prefill is none.
      trace: per step.
      cache: keys and values.
      head: state of the drafting head.
    """

    tokens: Int[Array, "B X"]
    prompt_length: RowInts
    text_length: RowInts
    limit: RowInts
    max_new_tokens: RowInts
    eos_ids: Int[Array, "B eos"]
    finish: RowInts
    seed: RowInts
    root_stats: RootStats
    entropy_average: Average
    accepted_average: Average
    topology: RowInts
    steps: RowInts
    trace: Trace
    cache: KVCache
    head: Any


class Request(NamedTuple):
    """One row's order.

    Attributes:
      prompt: token ids.
      max_new_tokens: at most so many tokens are emitted.
      eos_ids: tokens that end the text; none means that only a limit does.
      seed: of the row's noise.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    seed: int = 0


def start_state(
    requests: Sequence[Request | None],
    *,
    capacity: int,
    token_slots: int,
    cache: KVCache,
    head: Any,
) -> DecodeState:
    """State of a batch before its prefill.

    Args:
      requests: one per row; None is an idle row, finished from the start.
      capacity: cache slots that a row may fill.
      token_slots: X, size of the token buffer.
      cache: an empty cache.
      head: the head's empty state.

    Raises:
      UserError: a prompt is empty or does not fit, or a limit is negative.
    """
    batch = len(requests)
    tokens = np.zeros((batch, token_slots), np.int32)
    eos_ids = np.full((batch, MAX_EOS_IDS), NO_EOS, np.int32)
    rows = [request or Request(prompt=[0], max_new_tokens=0) for request in requests]
    for row, request in enumerate(rows):
        _check_request(request, capacity)
        tokens[row, : len(request.prompt)] = request.prompt
        eos_ids[row, : len(request.eos_ids)] = request.eos_ids
    prompt_length = np.asarray([len(request.prompt) for request in rows], np.int32)
    asked = np.asarray([request.max_new_tokens for request in rows], np.int32)
    finish = [Finish.RUNNING if request is not None else Finish.LENGTH for request in requests]
    return DecodeState(
        tokens=jnp.asarray(tokens),
        prompt_length=jnp.asarray(prompt_length),
        text_length=jnp.asarray(prompt_length),
        # The last token needs no slot: it is emitted from the one before it.
        limit=jnp.asarray(np.minimum(prompt_length + asked, capacity + 1)),
        max_new_tokens=jnp.asarray(asked),
        eos_ids=jnp.asarray(eos_ids),
        finish=jnp.asarray(finish, jnp.int32),
        seed=jnp.asarray([request.seed for request in rows], jnp.int32),
        root_stats=RootStats(entropy_nats=jnp.zeros(batch), top1_prob=jnp.zeros(batch)),
        entropy_average=empty_average(batch),
        accepted_average=empty_average(batch),
        topology=jnp.zeros(batch, jnp.int32),
        steps=jnp.zeros(batch, jnp.int32),
        trace=empty_trace(batch, capacity, NUM_SIGNALS),
        cache=cache,
        head=head,
    )


def _check_request(request: Request, capacity: int) -> None:
    length = len(request.prompt)
    if length == 0:
        raise UserError("the prompt is empty and the model has no BOS token to stand for it; give some text")
    if length > capacity:
        raise UserError(
            f"the prompt has {length} tokens, but the cache holds {capacity}; shorten it or raise the capacity"
        )
    if request.max_new_tokens < 0:
        raise UserError(f"max_new_tokens must be 0 or more; got {request.max_new_tokens}")
    if len(request.eos_ids) > MAX_EOS_IDS:
        raise UserError(f"at most {MAX_EOS_IDS} EOS ids; got {len(request.eos_ids)}")


def emit(
    state: DecodeState, tokens: Int[Array, "B E"], count: RowInts, stats: RootStats
) -> tuple[DecodeState, RowInts]:
    """Appends up to ``count`` tokens to every running row; stops at EOS or at the row's limit.

    Args:
      state: before.
      tokens: what was accepted, then the bonus token.
      count: ``[B]`` how many of them count, at least 1.
      stats: of the distribution that the last one was taken from.

    Returns:
      The state, and ``[B]`` how many tokens were really appended.
    """
    running = state.finish == Finish.RUNNING
    places = jnp.arange(tokens.shape[1])
    is_eos = (tokens[:, :, None] == state.eos_ids[:, None, :]).any(-1) & (places < count[:, None])
    until_eos = jnp.where(is_eos.any(1), jnp.argmax(is_eos, axis=1) + 1, tokens.shape[1] + 1)
    room = state.limit - state.text_length
    emitted = jnp.where(running, jnp.minimum(jnp.minimum(count, until_eos), room), 0)
    asked_for_less = state.prompt_length + state.max_new_tokens <= state.limit
    finish = jnp.where(
        until_eos <= jnp.minimum(count, room),
        Finish.EOS,
        jnp.where(emitted < room, Finish.RUNNING, jnp.where(asked_for_less, Finish.LENGTH, Finish.CACHE)),
    )
    finish = jnp.where(jnp.isfinite(stats.entropy_nats), finish, Finish.NONFINITE)
    # tokens[b, p] for the text position text_length[b] + p: a comparison per emitted token beats a scatter.
    slots = jnp.arange(state.tokens.shape[1])
    text = state.tokens
    for place in range(tokens.shape[1]):
        here = (slots == (state.text_length + place)[:, None]) & (place < emitted)[:, None]
        text = jnp.where(here, tokens[:, place, None], text)
    return (
        state._replace(
            tokens=text,
            text_length=state.text_length + emitted,
            finish=jnp.where(running, finish, state.finish),
            root_stats=stats,
        ),
        emitted,
    )


def current_signals(state: DecodeState, decay: Float[Array, ""], path_value: RowFloats) -> Float[Array, "B Q"]:
    """The signals from which the next step's topology is chosen, in the order of ``Signal``."""
    columns = {
        Signal.ENTROPY_EMA: corrected(state.entropy_average, decay),
        Signal.ENTROPY: state.root_stats.entropy_nats,
        Signal.TOP1_PROB: state.root_stats.top1_prob,
        Signal.ACCEPTED_EMA: corrected(state.accepted_average, decay),
        Signal.PATH_VALUE: path_value,
    }
    return jnp.stack([columns[signal] for signal in Signal], axis=1)
