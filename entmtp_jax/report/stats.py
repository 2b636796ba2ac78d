"""Figures of finished completions, as decode.py prints and writes them."""

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from entmtp_jax.bank import Bank
from entmtp_jax.generation import Completion
from entmtp_jax.scheduler import Signal


class Stats(TypedDict):
    """Figures of one prompt; the names are those of the JSON output.

    ``steps`` counts every pass while the row was live, the prefill not; ``tokens_per_step`` is
    new_tokens / steps (None without a step); ``accepted_histogram[i]`` counts steps that kept i drafts.
    """

    new_tokens: int
    steps: int
    tokens_per_step: float | None
    prefill_s: float
    decode_s: float
    tokens_per_s: float | None
    topology_steps: dict[str, int]
    accepted_histogram: list[int]
    entropy_mean_nats: float | None
    repeated_3gram_ratio: float


def repeated_3gram_ratio(tokens: Sequence[int]) -> float:
    """Share of 3-grams that occurred before in the same text: ``1 - unique / all``; 0 below three tokens."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def completion_stats(completion: Completion, bank: Bank, *, prefill_s: float, decode_s: float) -> Stats:
    """Figures of one completion.

    Args:
      completion: what was written.
      bank: names of the topologies.
      prefill_s: seconds of the batch's prefill.
      decode_s: seconds of the batch's decoding after it.
    """
    new_tokens, steps = len(completion.tokens), completion.steps
    names = [bank.topologies[index].name for index in completion.topologies]
    entropies = completion.signals[:, Signal.ENTROPY]
    return Stats(
        new_tokens=new_tokens,
        steps=steps,
        tokens_per_step=new_tokens / steps if steps else None,
        prefill_s=round(prefill_s, 6),
        decode_s=round(decode_s, 6),
        tokens_per_s=new_tokens / decode_s if steps and decode_s > 0 else None,
        topology_steps=dict(Counter(names)),
        accepted_histogram=np.bincount(completion.accepted, minlength=bank.depth + 1).tolist(),
        entropy_mean_nats=float(entropies.mean()) if steps else None,
        repeated_3gram_ratio=repeated_3gram_ratio(completion.tokens),
    )


def acceptance_by_depth(completions: Sequence[Completion], bank: Bank) -> list[tuple[int, int]]:
    """For each draft depth 1, 2, ...: steps that kept a draft that deep, and steps whose tree reached so deep.

    Steps of shallower trees do not count against a depth that they never drafted.
    """
    depths = np.asarray([topology.depth for topology in bank.topologies])
    kept = np.concatenate([completion.accepted for completion in completions])
    drafted = np.concatenate([depths[completion.topologies] for completion in completions])
    return [(int((kept >= d).sum()), int((drafted >= d).sum())) for d in range(1, bank.depth + 1)]


def outside_loops(tokens: Sequence[int]) -> np.ndarray:
    """Marks the tokens that are not part of a repetition: ``[tokens]`` bool.

    A token belongs to a repetition when it ends a 3-gram that occurred before in the same text. Greedy
    text of small models loops, which flatters every drafting method; figures over the other tokens do not.
    """
    seen: set[tuple[int, ...]] = set()
    fresh = np.ones(len(tokens), bool)
    for end in range(2, len(tokens)):
        gram = tuple(tokens[end - 2 : end + 1])
        fresh[end] = gram not in seen
        seen.add(gram)
    return fresh


def steps_outside_loops(completion: Completion) -> np.ndarray:
    """Marks the steps whose first emitted token is outside a repetition: ``[steps]`` bool."""
    fresh = outside_loops(completion.tokens)
    # The prefill emits token 0; step i starts after what the steps before it emitted.
    starts = 1 + np.concatenate([[0], np.cumsum(completion.emitted)[:-1]]).astype(int)
    return fresh[starts] if completion.steps else np.zeros(0, bool)
