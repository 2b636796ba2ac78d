"""Measurements that compare decoders: interleaved, in one process, compilation apart."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.attention import causal_mask
from entmtp_jax.backbone.cache import KVCache, init_cache, write_rows
from entmtp_jax.backbone.transformer import Backbone
from entmtp_jax.bank import Bank
from entmtp_jax.decode import Decoder, ModelParams
from entmtp_jax.generation import Completion, generate
from entmtp_jax.report.stats import repeated_3gram_ratio, steps_outside_loops
from entmtp_jax.scheduler import Policy, fixed
from entmtp_jax.state import Request
from entmtp_jax.types import Array, Int, Params


class Contestant(NamedTuple):
    """One way to decode; its programs are compiled before anything is timed.

    Attributes:
      name: in the table.
      decoder: compiled.
      params: of backbone and head.
      policy: picks the topologies.
    """

    name: str
    decoder: Decoder
    params: ModelParams
    policy: Policy


class Run(NamedTuple):
    """One prompt decoded by one contestant."""

    completion: Completion
    decode_s: float


def interleave(contestants: Sequence[Contestant], request: Request, repeats: int) -> dict[str, list[Run]]:
    """Decodes one prompt by every contestant in turn, ``repeats`` times, so that drift hits all alike."""
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for _ in range(repeats):
        for contestant in contestants:
            done = generate(contestant.decoder, contestant.params, [request], contestant.policy)
            runs[contestant.name].append(Run(done.completions[0], done.decode_s))
    return runs


@dataclasses.dataclass(frozen=True)
class Summary:
    """Figures of one contestant over one set of prompts.

    Attributes:
      tokens_per_step: new tokens over steps, all prompts together.
      tokens_per_step_outside_loops: the same over the steps that start outside a repetition.
      speedup: seconds of plain decoding over its own, all prompts together, medians of the repeats.
      speedup_quartiles: of the single prompts' speedups.
      ms_per_step: median over prompts.
      tokens_per_s: new tokens over seconds, all prompts together.
      topology_shares: share of steps by topology.
      repeated_3gram_ratio: mean over prompts.
      different: prompts whose tokens differ from plain decoding's.
    """

    tokens_per_step: float
    tokens_per_step_outside_loops: float
    speedup: float
    speedup_quartiles: tuple[float, float, float]
    ms_per_step: float
    tokens_per_s: float
    topology_shares: dict[str, float]
    repeated_3gram_ratio: float
    different: int


def summarise(runs: Sequence[list[Run]], plain: Sequence[list[Run]], bank: Bank) -> Summary:
    """Sums one contestant's runs up; ``plain`` are plain decoding's on the same prompts, in the same order."""
    first = [prompt_runs[0].completion for prompt_runs in runs]
    seconds = np.asarray([statistics.median(run.decode_s for run in r) for r in runs])
    plain_seconds = np.asarray([statistics.median(run.decode_s for run in r) for r in plain])
    tokens = np.asarray([len(completion.tokens) for completion in first])
    steps = np.asarray([completion.steps for completion in first])
    outside = [steps_outside_loops(completion) for completion in first]
    emitted_outside = sum(int(c.emitted[mask].sum()) for c, mask in zip(first, outside, strict=True))
    used = np.bincount(np.concatenate([c.topologies for c in first]), minlength=len(bank.topologies))
    timed = steps > 0
    ratios = plain_seconds[timed] / seconds[timed]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return Summary(
        tokens_per_step=float(tokens.sum() / steps.sum()),
        tokens_per_step_outside_loops=emitted_outside / max(sum(int(mask.sum()) for mask in outside), 1),
        speedup=float(plain_seconds.sum() / seconds.sum()),
        speedup_quartiles=(float(low), float(middle), float(high)),
        ms_per_step=float(np.median(1e3 * seconds[timed] / steps[timed])),
        tokens_per_s=float(tokens.sum() / seconds.sum()),
        topology_shares={t.name: n / used.sum() for t, n in zip(bank.topologies, used.tolist(), strict=True) if n},
        repeated_3gram_ratio=statistics.mean(repeated_3gram_ratio(c.tokens) for c in first),
        different=sum(c.tokens != p[0].completion.tokens for c, p in zip(first, plain, strict=True)),
    )


COST_PROMPT = "Explain in a few sentences how a bicycle stays upright."


class Cost(NamedTuple):
    """Measured milliseconds of one step of a topology: quartiles of the repeats."""

    low_ms: float
    median_ms: float
    high_ms: float


def step_costs(
    decoder: Decoder, params: ModelParams, requests: Sequence[Request], *, repeats: int = 5, steps: int = 8
) -> dict[str, Cost]:
    """Cost of a step of every topology in the bank, drafting included, interleaved.

    Each repeat runs ``steps`` steps of every topology in turn from the same prompts.
    """
    bank = decoder.bank
    times: dict[str, list[float]] = {topology.name: [] for topology in bank.topologies}
    for repeat in range(repeats + 1):
        for index, topology in enumerate(bank.topologies):
            # Enough tokens for all steps even when every draft is kept.
            limit = steps * (topology.depth + 1)
            few = [request._replace(max_new_tokens=limit, eos_ids=()) for request in requests]
            done = generate(decoder, params, few, fixed(index, num_topologies=len(bank.topologies)))
            if repeat:  # the first round warms up
                times[topology.name].append(1e3 * done.decode_s / max(c.steps for c in done.completions))
    return {name: Cost(*map(float, np.quantile(values, [0.25, 0.5, 0.75]))) for name, values in times.items()}


class Flips(NamedTuple):
    """Choices that differ between one-row and many-row passes over the same text.

    Attributes:
      positions: choices compared.
      flips: those that differ.
      worst_gap_ulps: largest top-2 gap among them, in bfloat16 units in the last place of the top logit.
    """

    positions: int
    flips: int
    worst_gap_ulps: float


BFLOAT16_EPSILON = 2.0**-7  # of 1.0: eight bits of significand


def flips_function(backbone: Backbone, *, rows: int, slots: int) -> Callable[[Params, list[int], list[int]], Flips]:
    """``(params, prompt, text) -> Flips``: feeds a plainly decoded text through wide passes and compares each choice.

    Args:
      backbone: whose arithmetic is examined.
      rows: of each pass, as wide as a tree.
      slots: cache size; at least prompt and text together, rounded up to ``rows``.
    """

    @jax.jit
    def one_pass(params: Params, cache: KVCache, tokens: Int[Array, "1 T"], start: Int[Array, ""]) -> tuple:
        positions = start + jnp.arange(rows, dtype=jnp.int32)[None]
        starts = jnp.full(1, start, jnp.int32)
        out = backbone.forward(params, tokens, positions, causal_mask(rows), cache, starts)
        values, ids = jax.lax.top_k(backbone.unembed(params, out.normed), 2)
        ulp = BFLOAT16_EPSILON * 2.0 ** jnp.floor(jnp.log2(jnp.abs(values[..., 0])))
        return write_rows(cache, out.new, starts), ids[0, :, 0], (values[..., 0] - values[..., 1])[0] / ulp[0]

    def flips(params: Params, prompt: list[int], text: list[int]) -> Flips:
        known = [*prompt, *text]
        cache = init_cache(backbone.config, batch=1, slots=slots, dtype=jnp.float32)
        chosen, gaps = [], []
        for start in range(0, len(known), rows):
            part = known[start : start + rows]
            tokens = jnp.asarray([part + [0] * (rows - len(part))], jnp.int32)
            cache, best, gap = one_pass(params, cache, tokens, jnp.int32(start))
            chosen += np.asarray(best)[: len(part)].tolist()
            gaps += np.asarray(gap)[: len(part)].tolist()
        before = len(prompt) - 1
        wrong = [i for i, token in enumerate(text) if chosen[before + i] != token]
        return Flips(len(text), len(wrong), max((gaps[before + i] for i in wrong), default=0.0))

    return flips
