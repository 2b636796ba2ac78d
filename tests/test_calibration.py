"""Growth, fit and replay on hand-worked traces, and replay against a plain walk and against real decoding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.bank import Bank
from entmtp_jax.calibration.figures import figures
from entmtp_jax.calibration.fit import fit_ladder
from entmtp_jax.calibration.growth import accepted_per_step, grow_topology, grow_where_steps_start, step_starts
from entmtp_jax.calibration.replay import Trace, accepted_lengths, replay, select_texts
from entmtp_jax.scheduler import UNFORCED, Signal, fixed, force, hysteresis, ladder
from entmtp_jax.topology import Topology, autoregressive, chain, k_ary
from tests.decoding import BANK, NUM_TOPOLOGIES, PROMPTS, continuation, decode, fixed_policy, noisy_ranks

TREE = Topology.from_paths("t1", [(0,), (1,), (0, 0)])


def trace_of(ranks, new_tokens, entropies=None, top1=None, logprobs=None, outside=None):
    """A trace; what is not given is 0, and everything is outside loops."""
    ranks = np.asarray(ranks, np.int32)
    zeros = np.zeros(len(ranks), np.float32)
    return Trace(
        ranks=ranks,
        chain_logprobs=np.zeros(ranks.shape, np.float32) if logprobs is None else np.asarray(logprobs, np.float32),
        entropy_nats=zeros if entropies is None else np.asarray(entropies, np.float32),
        top1_prob=zeros if top1 is None else np.asarray(top1, np.float32),
        outside_loops=np.ones(len(ranks), bool) if outside is None else np.asarray(outside),
        agrees=np.ones(len(ranks), bool),
        new_tokens=np.asarray(new_tokens, np.int32),
    )


def steps_of(trace, topologies, policy, **options):
    return replay(trace, topologies, [policy], **options).steps[0].sum(axis=0).tolist()


# Trees


def test_accepted_lengths_of_the_docstring_example():
    ranks = np.asarray([[0, 1], [2, 0], [0, 0], [1, 0]])
    assert accepted_lengths(ranks, TREE).tolist() == [1, 0, 2, 1]
    assert accepted_lengths(ranks, autoregressive()).tolist() == [0, 0, 0, 0]


def test_a_path_needs_its_whole_prefix():
    deep = Topology.from_paths("deep", [(0,), (0, 0), (0, 0, 1), (0, 0, 0)])
    assert accepted_lengths(np.asarray([[9, 0, 1], [0, 9, 1], [0, 0, 1]]), deep).tolist() == [0, 1, 3]


def test_deep_trees_do_not_overflow():
    ranks = np.zeros((2, 16), np.int64)
    ranks[1, 10] = 10_000
    assert accepted_lengths(ranks, chain(16)).tolist() == [16, 10]


def test_growth_takes_the_most_frequent_next_path():
    # Counts: (0,) 3, (1,) 2, (0,0) 2, (0,1) 1, (1,0) 2.
    ranks = np.asarray([[0, 0], [0, 0], [0, 1], [1, 0], [1, 0]])
    grown = grow_topology("grown", ranks, 4, max_depth=2, max_rank=3)
    assert sorted(grown.rank_paths) == [(0,), (0, 0), (1,), (1, 0)]
    assert grow_topology("one", ranks, 1, max_depth=2, max_rank=3).rank_paths == ((0,),)
    assert grow_topology("flat", ranks, 9, max_depth=1, max_rank=2).rank_paths == ((0,), (1,), (2,))


def test_steps_start_where_the_last_one_ended():
    """The docstring's example, and a second text whose last step runs over the end."""
    kept = np.asarray([1, 0, 2, 0, 0, 3, 0])
    assert step_starts(kept, np.asarray([0, 4, 4, 7])).tolist() == [True, False, True, False, True, True, False]


def test_growth_counts_only_where_steps_start():
    """A run of four and three single tokens at rank 1. Over all positions (0, 0) counts as much as (1,); but where
    the chain's steps start, 0, 3, 5, 6, 7, 8 and 9, once against twice, and the bush needs five steps for seven."""
    run, single = [[0, 0], [0, 0], [0, 0], [0, 9]], [[1, 9], [9, 9]]
    trace = trace_of([*run, *single * 3], [11])
    over_all = grow_topology("all", trace.ranks, 2, max_depth=2, max_rank=1)
    grown = grow_where_steps_start("grown", trace, np.ones(10, bool), 2, max_depth=2, max_rank=1)
    assert sorted(over_all.rank_paths) == [(0,), (0, 0)] and sorted(grown.rank_paths) == [(0,), (1,)]
    assert accepted_per_step(trace, over_all) == pytest.approx(3 / 7) and accepted_per_step(trace, grown) == 1.0
    for topology in (over_all, grown):
        found = replay(trace, (topology,), [fixed(0, num_topologies=1)])
        assert accepted_per_step(trace, topology) == pytest.approx(found.accepted.sum() / found.steps.sum())


# Replay


def test_replay_walks_the_text_by_what_is_kept():
    """Chain of 1: text 0 is read at its positions 0, 2 and 3 (the last draft ends the text), text 2 at its only one."""
    trace = trace_of([[0], [0], [9], [0], [9]], [5, 1, 2, 0])
    bank = (autoregressive(), chain(1))
    found = replay(trace, bank, [fixed(1, num_topologies=2), fixed(0, num_topologies=2)])
    assert found.steps.tolist() == [[[0, 3], [0, 0], [0, 1], [0, 0]], [[4, 0], [0, 0], [1, 0], [0, 0]]]
    assert found.accepted.tolist() == [[2, 0, 0, 0], [0, 0, 0, 0]]


def test_figures_in_and_outside_loops():
    """Steps at 0 (two tokens, outside), 2 (one, inside) and 3 (one, the last, outside)."""
    trace = trace_of([[0], [0], [9], [0]], [5], outside=[True, True, False, True])
    found = replay(trace, (chain(1),), [fixed(0, num_topologies=1)])
    (row,) = figures(trace, found, np.asarray([True]))
    assert (row.tokens_per_step, row.accepted_per_step, row.steps) == (5 / 3, 2 / 3, [3])
    assert (row.tokens_per_step_outside_loops, row.accepted_per_step_outside_loops) == (3 / 2, 1.0)
    (nothing,) = figures(trace, found, np.asarray([False]))
    assert (nothing.tokens_per_step, nothing.tokens_per_step_outside_loops) == (0.0, 0.0)


def test_texts_can_be_picked():
    trace = trace_of([[0], [1], [2], [3]], [3, 1, 0, 3], entropies=[1, 2, 3, 4])
    assert trace.bounds.tolist() == [0, 2, 2, 2, 4] and trace.text.tolist() == [0, 0, 3, 3]
    part = select_texts(trace, np.asarray([False, True, True, True]))
    assert part.new_tokens.tolist() == [1, 0, 3] and part.ranks.tolist() == [[2], [3]]
    assert part.entropy_nats.tolist() == [3, 4]


def test_hysteresis_keeps_the_previous_choice_between_its_edges():
    """The docstring's table: the entropies 0.5, 1.5, 2.5, 1.5, 0.5 give large, large, small, small, large."""
    trace = trace_of([[9]] * 5, [6], entropies=[0.5, 1.5, 2.5, 1.5, 0.5])
    bank = (autoregressive(), chain(1))
    table, edges = [[1, 0, 0], [1, 1, 0]], [1.0, 2.0]
    assert steps_of(trace, bank, hysteresis(table, edges, signal=Signal.ENTROPY)) == [2, 3]
    assert steps_of(trace, bank, ladder([1, 0, 0], edges, num_topologies=2, signal=Signal.ENTROPY)) == [3, 2]


def test_the_path_value_is_as_deep_as_the_bank_and_nothing_with_stale_timing():
    logs = np.log([[0.5, 0.5, 0.1], [0.9, 0.9, 0.1]])
    trace = trace_of([[9] * 3] * 2, [3], top1=[1.0, 1.0], logprobs=logs)
    bank = (autoregressive(), chain(2))
    policy = ladder([0, 1], [0.5], num_topologies=2, signal=Signal.PATH_VALUE)  # 0.25 and 0.81
    assert steps_of(trace, bank, policy, fresh=True) == [1, 1]
    assert steps_of(trace, bank, policy) == [2, 0]


def walk(trace, topologies, policy):
    """Replay of one policy in plain Python: per text and topology the steps; drafts kept; and those outside loops."""
    signal, edges, table, decay, forced = (np.asarray(field) for field in policy)
    lengths = [accepted_lengths(trace.ranks, topology) for topology in topologies]
    steps, sums = np.zeros((len(trace.new_tokens), len(topologies)), int), []
    for text, (start, end) in enumerate(zip(trace.bounds[:-1], trace.bounds[1:], strict=True)):
        place, previous, taken = start, 0, 0
        mean, weight, kept_mean, kept_weight, counts = 0.0, 0.0, 0.0, 0.0, np.zeros(4, int)
        while place < end:
            mean = decay * mean + (1 - decay) * trace.entropy_nats[place]
            weight = decay * weight + (1 - decay)
            path = trace.top1_prob[place] * np.exp(
                trace.chain_logprobs[place, : max(t.depth for t in topologies)].sum()
            )
            kept_average = kept_mean / kept_weight if kept_weight else 0.0
            values = [mean / weight, trace.entropy_nats[place], trace.top1_prob[place], kept_average, path]
            previous = table[previous, np.searchsorted(edges, values[signal], side="right")]
            if forced[taken] != UNFORCED:
                previous = forced[taken]
            kept = lengths[previous][place]
            emitted = min(kept + 1, end - place)
            steps[text, previous] += 1
            outside = trace.outside_loops[place]
            counts += [kept, outside, outside * emitted, outside * kept]
            if topologies[previous].depth:
                kept_mean = decay * kept_mean + (1 - decay) * kept
                kept_weight = decay * kept_weight + (1 - decay)
            place, taken = place + emitted, taken + 1
        sums.append(counts)
    return steps, np.asarray(sums).T


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lanes=st.sampled_from([1, 7, 1 << 16]))
def test_many_policies_at_once_are_each_walked_as_alone(seed, lanes):
    """All signals, tables that mind the previous choice, forced steps, texts of 0 to 9 tokens; in walks of any size."""
    rng = np.random.default_rng(seed)
    topologies = (autoregressive(), chain(3), k_ary((2, 2)))
    new_tokens = rng.integers(0, 10, 5)
    count = int(np.maximum(new_tokens - 1, 0).sum())
    trace = trace_of(
        rng.choice([0, 0, 1, 2, 10_000], (count, 3)),
        new_tokens,
        entropies=rng.random(count),
        top1=rng.random(count),
        logprobs=-rng.random((count, 3)),
        outside=rng.random(count) < 0.5,
    )
    policies = []
    for signal in [*Signal, *Signal]:
        table, edges = rng.integers(0, 3, (3, 3)).tolist(), np.sort(rng.random(2)).tolist()
        policies.append(hysteresis(table, edges, signal=signal, window=float(rng.choice([1, 2, 4]))))
    policies[0] = force(policies[0], [2, UNFORCED, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entmtp_jax.calibration.replay.LANES_PER_WALK", lanes)
        found = replay(trace, topologies, policies, fresh=True)
    for index, policy in enumerate(policies):
        steps, sums = walk(trace, topologies, policy)
        assert found.steps[index].tolist() == steps.tolist()
        assert np.asarray([field[index] for field in found[1:]]).tolist() == sums.tolist()


@pytest.mark.parametrize("edge", [0.3, 1.0, 2.0])
def test_replay_predicts_real_decoding(edge):
    """Steps by topology and tokens from the trace alone equal those of the compiled loop."""
    prompt, true_rank, count = PROMPTS[0], noisy_ranks(2), 40
    plain = decode([prompt], fixed_policy(0), true_rank=true_rank, max_new_tokens=count).completions[0]
    start = len(prompt)
    # Step j of plain decoding reads the entropy at position start - 1 + j; its first draft is at start + 1 + j.
    places = np.arange(len(plain.topologies))
    ranks = true_rank[start + 1 + places[:, None] + np.arange(4)]
    ranks = np.where(ranks < 0, 99, ranks)
    trace = trace_of(ranks, [count], entropies=plain.signals[:, Signal.ENTROPY])
    policy = ladder([2, 3], [edge], num_topologies=NUM_TOPOLOGIES)
    real = decode([prompt], policy, true_rank=true_rank).completions[0]
    assert real.tokens == continuation(prompt, count)
    assert steps_of(trace, BANK.topologies, policy) == np.bincount(real.topologies, minlength=NUM_TOPOLOGIES).tolist()


# The fit


def test_the_fit_drafts_where_drafts_are_kept():
    """Half of the positions are certain and drafted right, half uncertain and wrong: the edge lies between."""
    rng = np.random.default_rng(0)
    uncertain = np.repeat(rng.random(200) < 0.5, 10)
    ranks = np.where(uncertain[:, None], 9, 0) * np.ones((1, 2), int)
    trace = trace_of(ranks, [len(ranks) + 1], np.where(uncertain, 3.0, 0.1))
    bank = Bank("b", (autoregressive(), chain(2)))
    fitted = fit_ladder(trace, bank, {"ar": 10.0, "chain2": 18.0}, window=1.0)
    assert fitted.topology_by_bin == ("chain2", "ar")
    assert 0.1 < fitted.edges_nats[0] <= 3.0
    cheap = fit_ladder(trace, bank, {"ar": 10.0, "chain2": 10.0}, window=1.0)
    assert set(cheap.topology_by_bin) == {"chain2"}, "a free draft is always worth it"
