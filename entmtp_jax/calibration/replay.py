"""Decoding replayed from a trace, without a model: the steps that any bank and any policy would take.

A trace holds, for every position of texts that the backbone itself wrote, where the true tokens stand
among the head's candidates, and the signals. Which drafts a tree keeps follows from these alone. Many
policies are walked over all texts at once; each pair of policy and text is a *lane*.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from entmtp_jax.scheduler import UNFORCED, Policy, Signal
from entmtp_jax.topology import Topology
from entmtp_jax.types import Bool, Float, Int

LANES_PER_WALK = 1 << 16  # the arrays of so many lanes stay in the processor's cache


class Trace(NamedTuple):
    """Every position of several texts at which a step can start, text after text.

    A text of n new tokens has n - 1 of them: the prefill emits the first token and a step at least one. At
    position p of a text, counted from 0, the root is new token p and new token p + 1 is the first to be drafted.

    Attributes:
      ranks: ``[n, K]`` int32: rank of new token p+1+i among what the head offers at depth i+1 below the true
        path; a number beyond every tree where there is no such token or the head does not offer it.
      chain_logprobs: ``[n, K]`` float32 log-probability that the head gives to each token of its greedy chain.
      entropy_nats: ``[n]`` float32 entropy of the distribution that the root was taken from.
      top1_prob: ``[n]`` float32 probability of the best token there.
      outside_loops: ``[n]`` the first token that a step from here emits is outside a repetition, as
        ``report.stats.outside_loops`` marks it.
      agrees: ``[n]`` the pass over the whole text chooses the root too; where it does not, a near-tie fell
        differently, and replay may differ from decoding.
      new_tokens: ``[T]`` int32 tokens of each text's answer, the end-of-text token included.
    """

    ranks: Int[np.ndarray, "n K"]
    chain_logprobs: Float[np.ndarray, "n K"]
    entropy_nats: Float[np.ndarray, " n"]
    top1_prob: Float[np.ndarray, " n"]
    outside_loops: Bool[np.ndarray, " n"]
    agrees: Bool[np.ndarray, " n"]
    new_tokens: Int[np.ndarray, " T"]

    @property
    def bounds(self) -> Int[np.ndarray, " bounds"]:
        """``[T + 1]``: where the positions of each text begin, and where the last ones end."""
        return np.concatenate([[0], np.cumsum(np.maximum(self.new_tokens - 1, 0))])

    @property
    def text(self) -> Int[np.ndarray, " n"]:
        """Which text each position belongs to."""
        return np.repeat(np.arange(len(self.new_tokens)), np.diff(self.bounds))


def select_texts(trace: Trace, chosen: Bool[np.ndarray, " T"]) -> Trace:
    """The trace of some of the texts, in the same order."""
    here = chosen[trace.text]
    return Trace(*(field[here] for field in trace[:-1]), new_tokens=trace.new_tokens[chosen])


def accepted_lengths(ranks: Int[np.ndarray, "n K"], topology: Topology) -> Int[np.ndarray, " n"]:
    """Drafts that a step at each position would keep with this topology, at most K deep.

    Example: ranks ``[[0, 1], [2, 0]]`` and the tree ``{(0,), (1,), (0, 0)}``: the first position keeps 1
    (its second token stands at rank 1), the second none (rank 2 is not in the tree).
    """
    nowhere, other = topology.num_rows, topology.max_rank + 1
    # child[row, rank] is the row below; from `nowhere`, and by the rank `other`, one gets nowhere.
    child = np.full((nowhere + 1, other + 1), nowhere)
    for row in range(1, topology.num_rows):
        child[topology.parents[row], topology.ranks[row]] = row
    row, kept = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int32)
    for depth in range(topology.depth):
        row = child[row, np.minimum(ranks[:, depth], other)]
        kept += row != nowhere
    return kept


class Replay(NamedTuple):
    """What decoding would have done, by policy and text; sums over texts are figures of a set.

    *Outside* counts only the steps whose first token is outside a repetition.

    Attributes:
      steps: ``[P, T, M]`` int32 steps by topology.
      accepted: ``[P, T]`` drafts kept.
      steps_outside: ``[P, T]`` steps outside repetitions.
      emitted_outside: ``[P, T]`` tokens that these emitted.
      accepted_outside: ``[P, T]`` drafts that these kept.
    """

    steps: Int[np.ndarray, "P T M"]
    accepted: Int[np.ndarray, "P T"]
    steps_outside: Int[np.ndarray, "P T"]
    emitted_outside: Int[np.ndarray, "P T"]
    accepted_outside: Int[np.ndarray, "P T"]


class _Tables(NamedTuple):
    """Policies as arrays, fields as in ``Policy`` with the policies first; ``forced`` ends where nothing is forced."""

    signal: Int[np.ndarray, " P"]
    edges: Float[np.ndarray, "P edges"]
    table: Int[np.ndarray, "P M bins"]
    decay: Float[np.ndarray, " P"]
    forced: Int[np.ndarray, "P F"]


class _Lanes(NamedTuple):
    """Texts that are not read to their end; averages as raw sums with their weights, see ``entropy.Average``."""

    policy: Int[np.ndarray, " lanes"]
    text: Int[np.ndarray, " lanes"]
    place: Int[np.ndarray, " lanes"]
    end: Int[np.ndarray, " lanes"]
    previous: Int[np.ndarray, " lanes"]
    entropy: Float[np.ndarray, " lanes"]
    entropy_weight: Float[np.ndarray, " lanes"]
    accepted: Float[np.ndarray, " lanes"]
    accepted_weight: Float[np.ndarray, " lanes"]


def replay(trace: Trace, topologies: Sequence[Topology], policies: Sequence[Policy], *, fresh: bool = False) -> Replay:
    """Walks every text under every policy as decoding of one row would: choose, keep drafts, jump.

    Averages are taken in float32, as on the device; a signal within rounding of an edge may still fall on
    the other side of it there.

    Args:
      trace: the texts.
      topologies: of the bank, M of them, at most as deep as the trace and of no higher rank than it holds.
      policies: P of them, for this bank.
      fresh: ``DecodeConfig.fresh_signals``, without which the path value is 0.
    """
    lengths = np.stack([accepted_lengths(trace.ranks, topology) for topology in topologies])
    depths = np.asarray([topology.depth for topology in topologies])
    path_value = np.zeros_like(trace.top1_prob)
    if fresh and depths.max() > 0:
        path_value = trace.top1_prob * np.exp(trace.chain_logprobs[:, : depths.max()].sum(axis=1))
    per_walk = max(1, LANES_PER_WALK // max(len(trace.new_tokens), 1))
    walks = [
        _walk(trace, lengths, depths > 0, path_value, _stack(policies[start : start + per_walk]))
        for start in range(0, len(policies), per_walk)
    ]
    return Replay(*(np.concatenate(parts) for parts in zip(*walks, strict=True)))


def _stack(policies: Sequence[Policy]) -> _Tables:
    tables = _Tables(*(np.stack([np.asarray(value) for value in field]) for field in zip(*policies, strict=True)))
    forced_steps = np.flatnonzero((tables.forced != UNFORCED).any(axis=0))
    # Edges that are infinite for all, and steps that no policy forces, cost time and decide nothing.
    used = int(np.isfinite(tables.edges).sum(axis=1).max())
    return tables._replace(
        edges=tables.edges[:, :used], forced=tables.forced[:, : forced_steps.max() + 1 if len(forced_steps) else 0]
    )


def _walk(
    trace: Trace,
    lengths: Int[np.ndarray, "M n"],
    drafts: Bool[np.ndarray, " M"],
    path_value: Float[np.ndarray, " n"],
    tables: _Tables,
) -> Replay:
    lanes = _start(trace, len(tables.signal))
    shape = len(tables.signal), len(trace.new_tokens)
    found = Replay(np.zeros((*shape, len(lengths)), np.int32), *(np.zeros(shape, np.int32) for _ in range(4)))
    step = 0
    while len(lanes.place):
        policy, text, place = lanes.policy, lanes.text, lanes.place
        decay = tables.decay[policy]
        lanes = lanes._replace(
            entropy=decay * lanes.entropy + (1 - decay) * trace.entropy_nats[place],
            entropy_weight=decay * lanes.entropy_weight + (1 - decay),
        )
        index = _choose(trace, path_value, tables, lanes, step)
        kept = lengths[index, place]
        emitted = np.minimum(kept + 1, lanes.end - place)
        outside = trace.outside_loops[place]
        found.steps[policy, text, index] += 1  # a lane stands here once, so no place is named twice
        found.accepted[policy, text] += kept
        found.steps_outside[policy, text] += outside
        found.emitted_outside[policy, text] += outside * emitted
        found.accepted_outside[policy, text] += outside * kept
        drafted = drafts[index]
        lanes = lanes._replace(
            place=place + emitted,
            previous=index,
            accepted=np.where(drafted, decay * lanes.accepted + (1 - decay) * kept.astype(np.float32), lanes.accepted),
            accepted_weight=np.where(drafted, decay * lanes.accepted_weight + (1 - decay), lanes.accepted_weight),
        )
        unfinished = lanes.place < lanes.end
        lanes = _Lanes(*(field[unfinished] for field in lanes))
        step += 1
    return found


def _start(trace: Trace, num_policies: int) -> _Lanes:
    bounds = trace.bounds
    texts = np.flatnonzero(np.diff(bounds))
    policy, text = np.repeat(np.arange(num_policies), len(texts)), np.tile(texts, num_policies)
    zeros = np.zeros(len(policy), np.float32)
    return _Lanes(policy, text, bounds[text], bounds[text + 1], np.zeros_like(policy), zeros, zeros, zeros, zeros)


def _choose(
    trace: Trace, path_value: Float[np.ndarray, " n"], tables: _Tables, lanes: _Lanes, step: int
) -> Int[np.ndarray, " lanes"]:
    """The topology of every lane's step, as ``scheduler.choose`` picks it."""
    columns = {
        Signal.ENTROPY_EMA: lambda: lanes.entropy / lanes.entropy_weight,
        Signal.ENTROPY: lambda: trace.entropy_nats[lanes.place],
        Signal.TOP1_PROB: lambda: trace.top1_prob[lanes.place],
        Signal.ACCEPTED_EMA: lambda: lanes.accepted / np.maximum(lanes.accepted_weight, 1e-12),
        Signal.PATH_VALUE: lambda: path_value[lanes.place],
    }
    first, *others = np.unique(tables.signal)
    value = columns[Signal(first)]()
    for signal in others:
        value = np.where((tables.signal == signal)[lanes.policy], columns[Signal(signal)](), value)
    bins = np.zeros(len(lanes.place), np.int64)
    for edges in tables.edges.T:
        bins += edges[lanes.policy] <= value
    chosen = tables.table[lanes.policy, lanes.previous, bins]
    if step < tables.forced.shape[1]:
        forced = tables.forced[lanes.policy, step]
        chosen = np.where(forced == UNFORCED, chosen, forced)
    return chosen
