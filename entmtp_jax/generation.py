"""Text in, text out, at the level of token ids: whole batches at once or a few steps at a time."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.decode import Decoder, ModelParams
from entmtp_jax.errors import UserError
from entmtp_jax.scheduler import Policy
from entmtp_jax.state import DecodeState, Finish, Request

NO_STEP_LIMIT = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one row wrote and how.

    Attributes:
      tokens: new token ids, EOS included.
      finish_reason: ``eos``, ``length``, ``cache`` or ``nonfinite``.
      topologies: ``[steps]`` index of the topology of every step.
      accepted: ``[steps]`` drafts kept by every step.
      emitted: ``[steps]`` tokens emitted by every step; the prefill emits one more before them.
      signals: ``[steps, Q]`` what every choice was made from; columns are ``scheduler.Signal``.
    """

    tokens: list[int]
    finish_reason: str
    topologies: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    signals: np.ndarray

    @property
    def steps(self) -> int:
        """Passes of the backbone while the row was live, the prefill excluded."""
        return len(self.topologies)


class Generation(NamedTuple):
    """A finished batch.

    Attributes:
      completions: one per request, in order.
      prefill_s: seconds from the prompt to the first token, compilation excluded if the decoder is compiled.
      decode_s: seconds from there to the end.
    """

    completions: list[Completion]
    prefill_s: float
    decode_s: float


class Chunk(NamedTuple):
    """A few steps of a batch.

    Attributes:
      tokens: per request, the tokens that these steps emitted.
      emitted: per request, how many tokens each of these steps emitted; the prefill counts as a step.
      generation: the finished batch in the last chunk, else None.
    """

    tokens: list[list[int]]
    emitted: list[list[int]]
    generation: Generation | None


def compile_decoder(decoder: Decoder, params: ModelParams, policy: Policy) -> tuple[Decoder, float]:
    """The same decoder with prefill and run compiled ahead, and the seconds that this took."""
    start = time.perf_counter()
    state = jax.eval_shape(lambda: decoder.start([None] * decoder.config.batch))
    prefill_program = decoder.prefill.lower(params, state, policy).compile()
    run_program = decoder.run.lower(params, state, policy, jnp.int32(0)).compile()
    seconds = time.perf_counter() - start

    def prefill(params: ModelParams, state: DecodeState, policy: Policy) -> DecodeState:
        return prefill_program(params, state, policy)

    def run_steps(params: ModelParams, state: DecodeState, policy: Policy, max_steps: int) -> DecodeState:
        return run_program(params, state, policy, jnp.int32(max_steps))

    return decoder._replace(prefill=prefill, run=run_steps), seconds


def generate(decoder: Decoder, params: ModelParams, requests: Sequence[Request], policy: Policy) -> Generation:
    """Decodes a batch to its end.

    Args:
      decoder: built once per (backbone, head, bank, config).
      params: of backbone and head.
      requests: at most ``decoder.config.batch``; missing rows stay idle.
      policy: picks the topologies; any policy writes the same text.

    Raises:
      UserError: more requests than rows, or a request that does not fit.
    """
    *_, last = stream(decoder, params, requests, policy, steps_per_chunk=NO_STEP_LIMIT)
    assert last.generation is not None
    return last.generation


def stream(
    decoder: Decoder, params: ModelParams, requests: Sequence[Request], policy: Policy, *, steps_per_chunk: int = 4
) -> Iterator[Chunk]:
    """Decodes a batch and yields what a few steps emitted; the first chunk is the prefill's token.

    Args:
      decoder: as in ``generate``.
      params: as in ``generate``.
      requests: as in ``generate``.
      policy: as in ``generate``.
      steps_per_chunk: steps between two chunks; the host is asked only then.
    """
    batch = decoder.config.batch
    if len(requests) > batch:
        raise UserError(f"{len(requests)} requests for a decoder of {batch} rows; build it with a larger batch")
    began = time.perf_counter()
    state = decoder.start([*requests, *[None] * (batch - len(requests))])
    state = jax.block_until_ready(decoder.prefill(params, state, policy))
    prefilled = time.perf_counter()
    shown, shown_steps = [len(request.prompt) for request in requests], [-1] * len(requests)
    while True:
        done = bool((np.asarray(state.finish) != Finish.RUNNING).all())
        generation = None
        if done:
            timing = prefilled - began, time.perf_counter() - prefilled
            generation = Generation([_completion(state, row) for row in range(len(requests))], *timing)
        yield _chunk(state, shown, shown_steps, generation)
        if done:
            return
        shown = np.asarray(state.text_length)[: len(requests)].tolist()
        shown_steps = np.asarray(state.steps)[: len(requests)].tolist()
        state = jax.block_until_ready(decoder.run(params, state, policy, steps_per_chunk))


def _chunk(state: DecodeState, shown: list[int], shown_steps: list[int], generation: Generation | None) -> Chunk:
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.text_length)
    steps, emitted = np.asarray(state.steps), np.asarray(state.trace.emitted)
    news, counts = [], []
    for row, (start, first) in enumerate(zip(shown, shown_steps, strict=True)):
        news.append(tokens[row, start : lengths[row]].tolist())
        by_step = emitted[row, max(first, 0) : steps[row]].tolist()
        counts.append([len(news[-1])] if first < 0 else by_step)
    return Chunk(news, counts, generation)


def _completion(state: DecodeState, row: int) -> Completion:
    start, end, steps = (int(x[row]) for x in (state.prompt_length, state.text_length, state.steps))
    return Completion(
        tokens=np.asarray(state.tokens[row, start:end]).tolist(),
        finish_reason=Finish(int(state.finish[row])).name.lower(),
        topologies=np.asarray(state.trace.topology[row, :steps]),
        accepted=np.asarray(state.trace.accepted[row, :steps]),
        emitted=np.asarray(state.trace.emitted[row, :steps]),
        signals=np.asarray(state.trace.signals[row, :steps]),
    )
