"""One suite for every kind of head: whatever it drafts, the text is plain text, and its state is that of a fresh start.

Every head is run behind an oracle that can be told, position by position, to put the true token at rank 0 or to
offer nothing: with nothing it is the head alone with its random weights, and with everything its whole machinery
runs on right drafts. The oracle's behaviour and the schedule of topologies are data, so every kind is compiled once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.assets import assets_folder
from entmtp_jax.bank import Bank, load_bank
from entmtp_jax.decode import DecodeConfig, Decoder, ModelParams, build_decoder
from entmtp_jax.generation import Completion, generate
from entmtp_jax.heads.hybrid import Pair, build_hybrid
from entmtp_jax.report.compiled import cache_sized_copies
from entmtp_jax.scheduler import Policy, fixed, force
from entmtp_jax.state import DecodeState, Finish, Request
from entmtp_jax.testing.heads import ALWAYS, NOTHING, replay_head, replay_params
from entmtp_jax.topology import Topology, autoregressive, chain, k_ary
from tests.decoding import CAPACITY, CHUNK, PROMPTS, SLOTS, continuation, tiny
from tests.head_kinds import KINDS, V, head, head_params, shared

# Of level 1 rank 1 is expanded, of level 2 rank 1 below rank 0: neither is the lowest.
ODD = Topology.from_paths("odd", [(0,), (0, 0), (1,), (0, 1), (0, 1, 0)])
BUSH_PATHS = {*ODD.rank_paths, *chain(4).rank_paths, *k_ary((3, 2)).rank_paths, (1, 1, 0), (0, 1, 1), (0, 1, 1, 0)}


def shuffled(name: str, paths: set[tuple[int, ...]], seed: int) -> Topology:
    """A topology whose rows stand in a random order, parents before children."""
    random = np.random.default_rng(seed)
    rows: list[tuple[int, ...]] = [()]
    waiting = sorted(paths)
    while waiting:
        ready = [path for path in waiting if path[:-1] in rows]
        rows.append(ready[random.integers(len(ready))])
        waiting.remove(rows[-1])
    return Topology(name, (-1, *(rows.index(path[:-1]) for path in rows[1:])), (0, *(path[-1] for path in rows[1:])))


BUSH = shuffled("bush", BUSH_PATHS, seed=0)  # holds all the others
BANK = Bank("conformance", (autoregressive(), chain(4), ODD, BUSH))
PLAIN, CHAIN, ODD_INDEX, BUSH_INDEX = range(4)
BATCH = 2
RAGGED = [PROMPTS[0], PROMPTS[2]]  # 6 and 19 tokens
SCHEDULES = {
    "plain": [PLAIN] * 60,
    "chain": [CHAIN] * 60,
    "odd": [ODD_INDEX] * 60,
    "bush": [BUSH_INDEX] * 60,
    "every one": [PLAIN, CHAIN, ODD_INDEX, BUSH_INDEX] * 15,
    "plain, then deep": [PLAIN] * 12 + [CHAIN] * 48,
    "random": np.random.default_rng(1).integers(0, 4, 60).tolist(),
}
SOMETIMES = np.where(np.random.default_rng(2).random(SLOTS) < 0.6, ALWAYS, NOTHING)


@functools.cache
def decoder(kind: str) -> Decoder:
    """The decoder of a kind of head behind the oracle."""
    oracle = replay_head(vocab_size=V, top_k=1)
    config = DecodeConfig(batch=BATCH, capacity=CAPACITY, chunk=CHUNK)
    return build_decoder(tiny()[0], build_hybrid(oracle, head(kind)), BANK, config)


def model_params(kind: str, prompts: list[list[int]], hints: np.ndarray | int) -> ModelParams:
    """Parameters; ``hints`` says where the oracle speaks."""
    texts = [prompt + continuation(prompt, 80) for prompt in prompts]
    return ModelParams(tiny()[1], Pair(replay_params(texts, hints, slots=SLOTS), head_params(kind)))


def scheduled(indices: list[int]) -> Policy:
    return force(fixed(PLAIN, num_topologies=len(BANK.topologies)), indices)


def decode(
    kind: str, prompts: list[list[int]], hints: np.ndarray | int, indices: list[int], n: int
) -> list[Completion]:
    params = model_params(kind, prompts, hints)
    return generate(decoder(kind), params, [Request(p, n) for p in prompts], scheduled(indices)).completions


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_and_every_schedule_write_plain_text(kind):
    for prompts in (RAGGED, [PROMPTS[4], PROMPTS[3]]):
        for name, indices in SCHEDULES.items():
            for done, prompt in zip(decode(kind, prompts, NOTHING, indices, 30), prompts, strict=True):
                assert done.tokens == continuation(prompt, 30), name
                assert done.topologies.tolist() == indices[: done.steps]
    assert decoder(kind).run._cache_size() == 1, "a schedule is data"


@pytest.mark.parametrize("kind", KINDS)
def test_right_candidates_are_all_accepted(kind):
    """The oracle's token at rank 0 of every node: every tree keeps its greedy path whole, at once after plain steps."""
    greedy = [max((len(path) for path in tree.rank_paths if not any(path)), default=0) for tree in BANK.topologies]
    assert greedy == [0, 4, 2, 4]
    for indices in SCHEDULES.values():
        for done in decode(kind, RAGGED, ALWAYS, indices, 32):
            wanted = [greedy[index] for index in done.topologies]
            assert done.accepted[:-1].tolist() == wanted[:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_after_every_commit_is_that_of_a_fresh_prefill(kind):
    built, params = decoder(kind), model_params(kind, RAGGED, SOMETIMES)
    policy = scheduled([PLAIN] * 9 + [CHAIN, BUSH_INDEX, ODD_INDEX, PLAIN, BUSH_INDEX, CHAIN] * 3)
    state = built.prefill(params, built.start([Request(prompt, 60) for prompt in RAGGED]), policy)
    accepted = 0
    for _ in range(21):
        state = built.run(params, state, policy, 1)
        now = jax.device_get(state)
        texts = [now.tokens[row, : now.text_length[row]].tolist() for row in range(BATCH)]
        fresh = built.prefill(params, built.start([Request(text[:-1], 2) for text in texts]), policy)
        assert (fresh.text_length == now.text_length).all()
        for row, text in enumerate(texts):
            for got, wanted in zip(committed(now, row), committed(jax.device_get(fresh), row), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4, err_msg=f"after {len(text)} tokens")
        accepted = int(now.trace.accepted.sum())
    assert accepted > 10, "commits of several rows must be among them"


def committed(state: DecodeState, row: int) -> list[np.ndarray]:
    """What a head holds about a row's text, of a state on the host; slots past the text hold nothing of value."""
    length = int(state.text_length[row])
    held = []
    for leaf in jax.tree.leaves(state.head.second):
        if leaf.ndim == 4:  # keys or values [B, G, S, C]; the root is not committed
            leaf = leaf[:, :, : length - 1]
        elif leaf.ndim == 2 and leaf.dtype == np.int32:  # a text with its root
            leaf = leaf[:, :length]
        held.append(leaf[row])
    return held


@pytest.mark.parametrize("kind", KINDS)
def test_a_superset_tree_never_accepts_less(kind):
    more = 0
    for hints in (NOTHING, SOMETIMES):
        for start in range(0, 40, 5):
            texts = [prompt + continuation(prompt, start) for prompt in RAGGED]
            kept = {}
            for index in (PLAIN, CHAIN, ODD_INDEX, BUSH_INDEX):
                params = model_params(kind, RAGGED, hints)
                requests = [Request(text, 8) for text in texts]
                done = generate(decoder(kind), params, requests, scheduled([index] * 8)).completions
                kept[index] = np.asarray([one.accepted[0] for one in done])
            for smaller in (PLAIN, CHAIN, ODD_INDEX):
                assert (kept[smaller] <= kept[BUSH_INDEX]).all()
                more += int((kept[smaller] < kept[BUSH_INDEX]).sum())
    assert more > 0, "the larger tree must help somewhere"


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_depends_on_its_own_path_alone(kind):
    """A node holds what ``follow`` offers along its path: no matter what else the tree holds, and in which order."""
    built, params = decoder(kind), model_params(kind, RAGGED, NOTHING)
    state = built.prefill(params, built.start([Request(prompt, 60) for prompt in RAGGED]), scheduled([]))
    root = jnp.take_along_axis(state.tokens, state.text_length[:, None] - 1, axis=1)[:, 0]
    one, matrices = head(kind), shared()
    ancestors = BUSH.row_paths[:, 1:]  # of every row the nodes on the way to it, then itself again

    @jax.jit
    def draft_both_ways(params, state, root):
        proposal = one.propose(params, matrices, state, root, BUSH.depth)
        tree = one.complete(params, matrices, state, root, proposal, BUSH)
        state, root = jax.tree.map(lambda rows: jnp.repeat(rows, BUSH.num_rows, axis=0), (state, root))
        return tree, one.follow(params, matrices, state, root, tree.tokens[:, ancestors].reshape(-1, BUSH.depth))

    tree, alone = jax.device_get(draft_both_ways(params.head.second, state.head.second, root))
    assert (tree.tokens[:, 0] == root).all() and not tree.logprobs[:, 0].any()
    for row in range(1, BUSH.num_rows):
        below = (slice(row, None, BUSH.num_rows), BUSH.depths[row] - 1, BUSH.ranks[row])
        np.testing.assert_array_equal(tree.tokens[:, row], alone.tokens[below])
        np.testing.assert_allclose(tree.logprobs[:, row], alone.logprobs[below], atol=1e-3)


@pytest.mark.parametrize("kind", ["hydra++", "mtp of 3"])
def test_no_cache_is_ever_copied(kind):
    """Neither the backbone's nor the head's own, which has the same shape."""
    built, params = decoder(kind), model_params(kind, RAGGED, NOTHING)
    state = built.start([Request(prompt, 20) for prompt in RAGGED])
    program = built.run.lower(params, state, scheduled([]), 5).compile()  # the program of the other tests
    assert cache_sized_copies(program.as_text(), state.cache) == []


@pytest.mark.parametrize("kind", ["hydra++", "mtp"])
def test_the_published_tree_of_63_nodes(kind):
    bank = load_bank(assets_folder("trees") / "published" / "mc_sim_7b_63.json")
    oracle = replay_head(vocab_size=V, top_k=1)
    config = DecodeConfig(batch=1, capacity=CAPACITY, chunk=CHUNK)
    built = build_decoder(tiny()[0], build_hybrid(oracle, head(kind)), bank, config)
    policy = fixed(0, num_topologies=len(bank.topologies))
    for hints in (NOTHING, SOMETIMES, ALWAYS):
        params = model_params(kind, [PROMPTS[2]], hints)
        [done] = generate(built, params, [Request(PROMPTS[2], 31)], policy).completions
        assert done.tokens == continuation(PROMPTS[2], 31)
        assert (done.accepted[:-1] == 4).all() or hints is not ALWAYS


def test_a_row_that_ends_early_leaves_the_other_alone():
    """Finished rows are advanced with nothing valid; their heads stay as they were."""
    built, params = decoder("mtp"), model_params("mtp", RAGGED, SOMETIMES)
    policy = scheduled([BUSH_INDEX] * 60)
    state = built.prefill(params, built.start([Request(RAGGED[0], 3), Request(RAGGED[1], 30)]), policy)
    while int(state.finish[0]) == Finish.RUNNING:
        state = built.run(params, state, policy, 1)
    before = committed(jax.device_get(state), 0)
    state = built.run(params, state, policy, 100)
    for old, new in zip(before, committed(jax.device_get(state), 0), strict=True):
        np.testing.assert_array_equal(old, new)
    length = len(RAGGED[1])
    assert state.tokens[1, length : length + 30].tolist() == continuation(RAGGED[1], 30)
