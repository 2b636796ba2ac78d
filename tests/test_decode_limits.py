"""EOS, limits, the edge of the cache, batches, and degenerate banks and requests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.bank import Bank
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.errors import UserError
from entmtp_jax.generation import generate, stream
from entmtp_jax.heads.lookup import build_lookup
from entmtp_jax.heads.medusa import MedusaConfig, build_medusa
from entmtp_jax.scheduler import fixed, force
from entmtp_jax.state import Finish, Request
from entmtp_jax.testing.heads import replay_head, replay_params
from entmtp_jax.testing.reference import reference_decode
from entmtp_jax.testing.tiny import TINY_CONFIG
from entmtp_jax.topology import Topology, chain, k_ary
from tests.decoding import (
    BANK,
    CAPACITY,
    CHUNK,
    NUM_TOPOLOGIES,
    PROMPTS,
    SLOTS,
    continuation,
    decode,
    decoder,
    fixed_policy,
    model_params,
    noisy_ranks,
    tiny,
)

CHAIN = 2  # the chain of 4 in the test bank


@pytest.mark.parametrize("place", range(1, 8))
def test_eos_at_every_depth_of_an_accepted_path(place):
    """An oracle's chain of 4 emits places 2 .. 6 in its first step; EOS stands at each of them in turn."""
    text = continuation(PROMPTS[0], 12)
    eos = text[place - 1]
    first = text.index(eos) + 1
    for index in range(NUM_TOPOLOGIES):
        done = decode([PROMPTS[0]], fixed_policy(index), eos_ids=(eos,)).completions[0]
        assert done.tokens == text[:first] and done.finish_reason == "eos"


def test_the_first_of_several_eos_ids_counts():
    text = continuation(PROMPTS[0], 12)
    for ids in ((text[7], text[3]), (text[3], text[7]), (TINY_CONFIG.vocab_size - 1, text[3])):
        done = decode([PROMPTS[0]], fixed_policy(CHAIN), eos_ids=ids).completions[0]
        expected = min(text.index(i) for i in ids if i in text) + 1
        assert done.tokens == text[:expected] and done.finish_reason == "eos"


@pytest.mark.parametrize("limit", range(0, 2 * 4 + 3))
def test_max_new_tokens_is_met_exactly(limit):
    for index in (0, CHAIN, 4):
        done = decode([PROMPTS[0]], fixed_policy(index), max_new_tokens=limit).completions[0]
        assert done.tokens == continuation(PROMPTS[0], limit) and done.finish_reason == "length"


def test_eos_at_the_cap_is_reported_as_eos():
    text = continuation(PROMPTS[0], 12)
    for index in (0, CHAIN):
        cap = next(n for n in range(4, 12) if text[n - 1] not in text[: n - 1])
        done = decode([PROMPTS[0]], fixed_policy(index), eos_ids=(text[cap - 1],), max_new_tokens=cap).completions[0]
        assert done.finish_reason == "eos" and len(done.tokens) == cap


@pytest.mark.parametrize("slack", range(-BANK.max_rows + 1, BANK.max_rows + 1, 2))
def test_the_edge_of_the_cache(slack):
    """Prompt and new tokens fill the cache exactly, with room to spare, or not: as the reference says."""
    _, params = tiny()
    capacity, prompt = 28, PROMPTS[2]
    asked = capacity - len(prompt) + slack
    expected = reference_decode(TINY_CONFIG, params, prompt, max_new_tokens=asked, capacity=capacity)
    for index in (0, CHAIN, 4):
        for true_rank in (0, noisy_ranks()):
            done = decode(
                [prompt], fixed_policy(index), true_rank=true_rank, max_new_tokens=asked, capacity=capacity
            ).completions[0]
            assert (done.tokens, done.finish_reason) == (expected.tokens, expected.finish_reason)


def test_a_prompt_that_fills_the_cache_still_gets_its_next_token():
    prompt = (PROMPTS[2] * 2)[:28]
    _, params = tiny()
    expected = reference_decode(TINY_CONFIG, params, prompt, max_new_tokens=5, capacity=28)
    done = decode([prompt], fixed_policy(CHAIN), max_new_tokens=5, capacity=28).completions[0]
    assert (done.tokens, done.finish_reason) == (expected.tokens, "cache") and len(done.tokens) == 1


def test_committed_slots_are_never_overwritten_at_the_end_of_the_cache():
    """JAX shifts an update that reaches past the end back over valid slots; the spare slots prevent it."""
    built = decoder("replay", 1, 28)
    params = model_params("replay", [PROMPTS[2]])
    policy = force(fixed_policy(4), [])
    state = built.prefill(params, built.start([Request(PROMPTS[2], 50)]), policy)
    while int(state.finish[0]) == Finish.RUNNING:
        before = [np.asarray(leaf) for leaf in jax.tree.leaves(state.cache)]
        committed = int(state.text_length[0]) - 1
        state = built.run(params, state, policy, 1)
        for old, new in zip(before, jax.tree.leaves(state.cache), strict=True):
            np.testing.assert_array_equal(old[0, :, :committed], new[0, :, :committed])
    assert int(state.finish[0]) == Finish.CACHE


BATCH = [PROMPTS[0], PROMPTS[2], PROMPTS[1]]


def test_rows_of_a_ragged_batch_equal_their_single_runs():
    for policy in (fixed_policy(0), fixed_policy(4), force(fixed_policy(0), [4, 2, 0, 3] * 12)):
        together = decode(BATCH, policy, true_rank=noisy_ranks(), batch=3).completions
        for prompt, row in zip(BATCH, together, strict=True):
            alone = decode([prompt], policy, true_rank=noisy_ranks()).completions[0]
            assert (row.tokens, row.finish_reason) == (alone.tokens, alone.finish_reason)
            assert row.accepted.tolist() == alone.accepted.tolist()


def test_a_row_that_finishes_early_leaves_the_others_alone():
    eos = continuation(BATCH[0], 5)[4]
    done = decode(BATCH, fixed_policy(CHAIN), eos_ids=(eos,), batch=3).completions
    for prompt, row in zip(BATCH, done, strict=True):
        text = continuation(prompt, 40)
        expected = text[: text.index(eos) + 1] if eos in text else text
        assert row.tokens == expected
    assert done[0].steps < max(row.steps for row in done), "steps count only while the row is live"


def test_row_order_duplicates_and_idle_rows_do_not_matter():
    policy = force(fixed_policy(0), [2, 4, 0] * 15)
    for batch in (BATCH[::-1], [BATCH[1]] * 3, BATCH[:1], BATCH[:2]):
        rows = decode(batch, policy, true_rank=noisy_ranks(), batch=3).completions
        assert [row.tokens for row in rows] == [continuation(prompt, 40) for prompt in batch]


def test_streamed_tokens_join_to_the_generated_ones():
    params = model_params("replay", BATCH, noisy_ranks())
    requests = [Request(prompt, 21) for prompt in BATCH]
    chunks = list(stream(decoder("replay", 3), params, requests, fixed_policy(4), steps_per_chunk=2))
    whole = generate(decoder("replay", 3), params, requests, fixed_policy(4)).completions
    for row in range(3):
        assert [t for chunk in chunks for t in chunk.tokens[row]] == whole[row].tokens
        counts = [count for chunk in chunks for count in chunk.emitted[row]]
        assert counts == [1, *whole[row].emitted.tolist()]
    assert [chunk.generation is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


@pytest.mark.parametrize(
    ("bank", "head", "message"),
    [
        (Bank("deep", (chain(9),)), replay_head(vocab_size=61), "9"),
        (Bank("ranks", (k_ary((17,)),)), replay_head(vocab_size=61), "16"),
        (Bank("wide", (k_ary((13, 8)),)), replay_head(vocab_size=61, top_k=20), str(CAPACITY)),
    ],
)
def test_a_bank_that_does_not_fit_is_refused(bank, head, message):
    backbone, _ = tiny()
    with pytest.raises(UserError, match=message):
        build_decoder(backbone, head, bank, DecodeConfig(capacity=CAPACITY, chunk=CHUNK))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 5), "empty"),
        (Request([1] * (CAPACITY + 1), 5), f"{CAPACITY + 1} tokens"),
        (Request([1], -1), "max_new_tokens"),
        (Request([1], 5, tuple(range(9))), "EOS"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(request_, message):
    with pytest.raises(UserError, match=message):
        decoder().start([request_])


def test_more_requests_than_rows_are_refused():
    with pytest.raises(UserError, match="2 requests"):
        generate(decoder(), model_params("replay", BATCH[:1]), [Request([1], 1)] * 2, fixed_policy(0))


def test_a_vocabulary_smaller_than_top_k_is_refused():
    with pytest.raises(UserError, match="top-k of 10"):
        build_medusa(MedusaConfig(hidden_size=8, vocab_size=4), top_k=10)


def test_a_bank_of_one_topology_decodes():
    backbone, params = tiny()
    for topology in (chain(3), Topology.from_paths("one", [(0,)])):
        built = build_decoder(
            backbone, build_lookup(), Bank("one", (topology,)), DecodeConfig(capacity=CAPACITY, chunk=CHUNK)
        )
        done = generate(built, ModelParams(params, {}), [Request(PROMPTS[4], 20)], fixed(0, num_topologies=1))
        assert done.completions[0].tokens == continuation(PROMPTS[4], 20)


def test_logits_that_are_not_finite_finish_the_row():
    _, params = tiny()
    broken = params | {"final_norm": {"scale": jnp.full(TINY_CONFIG.hidden_size, jnp.nan)}}
    text = replay_params([[0] * 8], 0, slots=SLOTS)
    done = generate(decoder(), ModelParams(broken, text), [Request([1, 2], 20)], fixed_policy(CHAIN)).completions[0]
    assert done.finish_reason == "nonfinite" and len(done.tokens) <= 1


def test_scanned_layers_decode_like_unrolled_ones():
    from entmtp_jax.backbone.transformer import build_backbone, stack_layers

    _, params = tiny()
    config = dataclasses.replace(TINY_CONFIG, scan_layers=True)
    bank = Bank("two", (BANK.topologies[0], BANK.topologies[4]))
    head = replay_head(vocab_size=TINY_CONFIG.vocab_size)
    built = build_decoder(build_backbone(config), head, bank, DecodeConfig(batch=3, capacity=CAPACITY, chunk=CHUNK))
    text = model_params("replay", BATCH, noisy_ranks()).head
    stacked = ModelParams(stack_layers(params, TINY_CONFIG.num_layers), text)
    policy = force(fixed(0, num_topologies=2), [0, 1, 1] * 20)
    done = generate(built, stacked, [Request(prompt, 30) for prompt in BATCH], policy).completions
    assert [row.tokens for row in done] == [continuation(prompt, 30) for prompt in BATCH]
