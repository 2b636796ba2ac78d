"""Growth and replay on hand-worked traces, and replay against real decoding."""

import numpy as np
import pytest

from entmtp_jax.bank import Bank
from entmtp_jax.calibration.fit import fit_ladder
from entmtp_jax.calibration.replay import Trace, accepted_lengths, grow_topology, replay_ladder
from entmtp_jax.scheduler import ladder
from entmtp_jax.topology import Topology, autoregressive, chain
from tests.decoding import BANK, NUM_TOPOLOGIES, PROMPTS, continuation, decode, fixed_policy, noisy_ranks

TREE = Topology.from_paths("t1", [(0,), (1,), (0, 0)])


def trace_of(ranks, entropies=None, text=None):
    ranks = np.asarray(ranks, np.int32)
    zeros = np.zeros(len(ranks))
    return Trace(
        ranks, zeros if entropies is None else np.asarray(entropies), zeros.astype(int) if text is None else text
    )


def test_accepted_lengths_of_the_docstring_example():
    assert accepted_lengths(trace_of([[0, 1], [2, 0], [0, 0], [1, 0]]), TREE).tolist() == [1, 0, 2, 1]


def test_a_path_needs_its_whole_prefix():
    deep = Topology.from_paths("deep", [(0,), (0, 0), (0, 0, 1), (0, 0, 0)])
    assert accepted_lengths(trace_of([[9, 0, 1], [0, 9, 1], [0, 0, 1]]), deep).tolist() == [0, 1, 3]


def test_growth_takes_the_most_frequent_next_path():
    # Counts: (0,) 3, (1,) 2, (0,0) 2, (0,1) 1, (1,0) 2.
    trace = trace_of([[0, 0], [0, 0], [0, 1], [1, 0], [1, 0]])
    grown = grow_topology("grown", trace, 4, max_depth=2, max_rank=3)
    assert sorted(grown.rank_paths) == [(0,), (0, 0), (1,), (1, 0)]
    assert grow_topology("one", trace, 1, max_depth=2, max_rank=3).rank_paths == ((0,),)
    assert grow_topology("flat", trace, 9, max_depth=1, max_rank=2).rank_paths == ((0,), (1,), (2,))


def test_replay_walks_the_text_by_what_is_kept():
    trace = trace_of([[0], [0], [9], [0], [9]], text=np.asarray([0, 0, 0, 0, 1]))
    bank = (autoregressive(), chain(1))
    lengths = np.stack([accepted_lengths(trace, topology) for topology in bank])
    # Chain of 1: text 0 is read at positions 0 and 2 and 3 (its last draft passes the end), text 1 at 4.
    replay = replay_ladder(trace, lengths, [], [1], 0.75)
    assert replay.steps.tolist() == [0, 4] and replay.tokens == 5
    assert replay_ladder(trace, lengths, [], [0], 0.75).steps.tolist() == [5, 0]


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
    trace = Trace(ranks, plain.signals[:, 1], np.zeros(len(places), int))
    lengths = np.stack([accepted_lengths(trace, topology) for topology in BANK.topologies])
    replay = replay_ladder(trace, lengths, [edge], [2, 3], 0.75)
    real = decode([prompt], ladder([2, 3], [edge], num_topologies=NUM_TOPOLOGIES), true_rank=true_rank).completions[0]
    assert real.tokens == continuation(prompt, count)
    assert replay.steps.tolist() == np.bincount(real.topologies, minlength=NUM_TOPOLOGIES).tolist()
    assert replay.tokens == count - 1


def test_the_fit_drafts_where_drafts_are_kept():
    """Half of the positions are certain and drafted right, half uncertain and wrong: the edge lies between."""
    rng = np.random.default_rng(0)
    uncertain = np.repeat(rng.random(200) < 0.5, 10)
    trace = trace_of(np.where(uncertain[:, None], 9, 0) * np.ones((1, 2), int), np.where(uncertain, 3.0, 0.1))
    bank = Bank("b", (autoregressive(), chain(2)))
    fitted = fit_ladder(trace, bank, {"ar": 10.0, "chain2": 18.0}, decay=0.0)
    assert fitted.topology_by_bin == ("chain2", "ar")
    assert 0.1 < fitted.edges_nats[0] <= 3.0
    cheap = fit_ladder(trace, bank, {"ar": 10.0, "chain2": 10.0}, decay=0.0)
    assert set(cheap.topology_by_bin) == {"chain2"}, "a free draft is always worth it"
