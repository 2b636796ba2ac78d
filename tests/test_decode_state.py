"""State after commit, and the algebra of trees, against fresh prefills and plain forward passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.backbone.attention import causal_mask
from entmtp_jax.backbone.cache import init_cache
from entmtp_jax.bank import Bank
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.scheduler import fixed, force
from entmtp_jax.state import Request
from entmtp_jax.testing.heads import replay_head, replay_params
from entmtp_jax.testing.reference import reference_logits
from entmtp_jax.testing.tiny import TINY_CONFIG
from entmtp_jax.topology import Topology, chain
from tests.decoding import (
    BANK,
    CAPACITY,
    NUM_TOPOLOGIES,
    PROMPTS,
    SLOTS,
    continuation,
    decoder,
    fixed_policy,
    model_params,
    noisy_ranks,
    prefilled,
    tiny,
)


def committed(state, row):
    """Keys and values of a row's committed slots, all layers."""
    end = int(state.text_length[row]) - 1
    return [np.asarray(leaf[row, :, :end]) for leaf in jax.tree.leaves(state.cache)]


@pytest.mark.parametrize("kind", ["replay", "medusa", "lookup"])
def test_after_every_commit_the_state_equals_a_fresh_prefill(kind):
    """Cache, root statistics and head state after every step, over 20 steps that use every topology."""
    prompts = [PROMPTS[0], PROMPTS[4]]
    policy = force(fixed_policy(0), [0, 2, 4, 3, 1, 0, 0, 4, 2, 3] * 2)
    built, params, state = prefilled(kind, prompts, policy, noisy_ranks(), batch=2)
    for _ in range(20):
        state = built.run(params, state, policy, 1)
        texts = [np.asarray(state.tokens[row, : int(state.text_length[row])]).tolist() for row in range(2)]
        fresh = built.prefill(params, built.start([Request(text[:-1], 60) for text in texts]), policy)
        for row in range(2):
            assert texts[row][-1] == int(fresh.tokens[row, len(texts[row]) - 1]), "root"
            for ours, theirs in zip(committed(state, row), committed(fresh, row), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-4)
        np.testing.assert_allclose(state.root_stats.entropy_nats, fresh.root_stats.entropy_nats, atol=2e-4)
        for ours, theirs in zip(jax.tree.leaves(state.head), jax.tree.leaves(fresh.head), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.parametrize("index", range(NUM_TOPOLOGIES))
def test_logits_of_a_node_equal_a_plain_forward_on_its_root_path(index):
    """Catches positions taken from the row instead of the depth, and wrong masks, in any row order."""
    topology, (backbone, params) = BANK.topologies[index], tiny()
    prompt, root = PROMPTS[0], 17
    tokens = jnp.asarray(np.random.default_rng(index).integers(0, TINY_CONFIG.vocab_size, (1, topology.num_rows)))
    tokens = tokens.at[0, 0].set(root)
    built, decode_params = decoder(), model_params("replay", [prompt])
    state = built.prefill(decode_params, built.start([Request(prompt, 8)]), fixed_policy(0))
    lengths = jnp.asarray([len(prompt)])
    positions = lengths[:, None] + jnp.asarray(topology.depths)
    out = backbone.forward(params, tokens, positions, jnp.asarray(topology.self_mask)[None], state.cache, lengths)
    logits = backbone.unembed(params, out.normed)[0]
    for row in range(topology.num_rows):
        path = topology.row_paths[row][: topology.depths[row] + 1]
        expected = reference_logits(TINY_CONFIG, params, prompt + tokens[0, path].tolist())[-1]
        np.testing.assert_allclose(logits[row], expected, atol=2e-3, rtol=2e-3)


def one_step(topology, true_rank, prompt=PROMPTS[0]):
    """Tokens kept by one step of a tree from the state after the prompt."""
    backbone, params = tiny()
    head = replay_head(vocab_size=TINY_CONFIG.vocab_size)
    built = build_decoder(backbone, head, Bank("one", (topology,)), DecodeConfig(capacity=CAPACITY, chunk=8))
    text = prompt + continuation(prompt, 80)
    decode_params = ModelParams(params, replay_params([text], true_rank, slots=SLOTS))
    policy = fixed(0, num_topologies=1)
    state = built.prefill(decode_params, built.start([Request(prompt, 40)]), policy)
    state = built.run(decode_params, state, policy, 1)
    return int(state.trace.accepted[0, 0])


def test_a_superset_tree_never_accepts_less_and_row_order_does_not_matter():
    small = Topology.from_paths("small", [(0,), (1,), (1, 0)])
    large = Topology.from_paths("large", [(0,), (1,), (2,), (1, 0), (1, 1), (1, 0, 0), (2, 0)])
    # The same tree as ``large`` with its rows in another topological order.
    shuffled = Topology("shuffled", parents=(-1, 0, 0, 0, 3, 2, 3, 6), ranks=(0, 0, 2, 1, 1, 0, 0, 0))
    assert sorted(shuffled.rank_paths) == sorted(large.rank_paths)
    for seed in range(4):
        ranks = noisy_ranks(seed)
        kept = {tree.name: one_step(tree, ranks) for tree in (small, large, shuffled)}
        assert kept["small"] <= kept["large"] == kept["shuffled"]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_sibling_branch_is_accepted_at_every_depth_and_rank(rank):
    """The true token stands at one rank everywhere: the path of that rank is kept whole."""
    # Full ternary tree of depth 2, and the third level below the path of this rank.
    paths = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    paths += [(rank, rank, c) for c in range(3)]
    assert one_step(Topology.from_paths("ternary", paths), rank) == 3


def test_token_zero_is_no_padding():
    """A model that writes token 0 all the time: paths shorter than the tree's depth must not gain by it."""
    backbone, params = tiny()
    config = TINY_CONFIG
    zeros = jax.tree.map(jnp.zeros_like, params)
    params = zeros | {"final_norm": params["final_norm"], "embed": params["embed"]}
    # All logits are equal, so the lowest id, 0, is the choice after every token.
    params["unembed"] = {"kernel": jnp.zeros_like(params["unembed"]["kernel"])}
    tree = Topology.from_paths("uneven", [(0,), (1,), (0, 0), (0, 0, 0)])
    head = replay_head(vocab_size=config.vocab_size)
    built = build_decoder(backbone, head, Bank("uneven", (tree,)), DecodeConfig(capacity=CAPACITY, chunk=8))
    for true_rank, kept in ((0, 3), (1, 1), (-1, 0)):
        decode_params = ModelParams(params, replay_params([[0] * 60], true_rank, slots=SLOTS))
        policy = fixed(0, num_topologies=1)
        state = built.prefill(decode_params, built.start([Request([5, 6], 20)]), policy)
        state = built.run(decode_params, state, policy, 3)
        assert state.trace.accepted[0, :3].tolist() == [kept] * 3


def test_a_chain_is_plain_decoding_step_by_step():
    """Logits of a chain's rows equal those of one causal forward pass over the same tokens."""
    backbone, params = tiny()
    topology, tokens = chain(4), jnp.asarray([[9, 2, 40, 7, 33]])
    positions = jnp.arange(5)[None]
    cache = init_cache(TINY_CONFIG, batch=1, slots=8, dtype=jnp.float32)
    empty = jnp.zeros(1, jnp.int32)
    as_tree = backbone.forward(params, tokens, positions, jnp.asarray(topology.self_mask)[None], cache, empty)
    as_text = backbone.forward(params, tokens, positions, causal_mask(5), cache, empty)
    np.testing.assert_array_equal(as_tree.normed, as_text.normed)
