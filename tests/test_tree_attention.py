"""The C++ attention kernel: numbers against float64, bits of a tree against its tokens one by one, control flow."""

import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.backbone.attention import causal_mask, choose_attend, two_part_attention
from entmtp_jax.kernels import tree_attention

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def attend(tmp_path_factory):
    cache = tmp_path_factory.mktemp("attention_kernel")
    if not tree_attention.KERNEL.build(cache):
        pytest.skip(f"no kernel here: {tree_attention.KERNEL.reason}")
    return attend_arrays


def attend_arrays(*arguments) -> jax.Array:
    return tree_attention.attend(*map(jnp.asarray, arguments))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def problem(seed, *, batch=1, tokens, heads=6, groups=3, dim=64, slots=40, lengths=None, mask_batch=1):
    """Random arguments of ``attend`` as NumPy arrays; the mask is a random tree per row of it."""
    rng = np.random.default_rng(seed)
    new, old = (batch, groups, tokens, dim), (batch, groups, slots, dim)
    arrays = [normal(rng, batch, tokens, heads, dim), normal(rng, *new), normal(rng, *new)]
    mask = np.stack([tree_mask([int(rng.integers(-1, i)) for i in range(tokens)]) for _ in range(mask_batch)])
    lengths = rng.integers(0, slots + 1, batch) if lengths is None else lengths
    return [*arrays, mask, normal(rng, *old), normal(rng, *old), np.asarray(lengths, np.int32)]


def tree_mask(parents: list[int]) -> np.ndarray:
    """``[i, j]``: token i sees itself and its ancestors; parent -1 is none."""
    mask = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


def float64_attention(query, keys, values, mask, cached_keys, cached_values, lengths) -> np.ndarray:
    """The formula, query by query, over the visible keys alone."""
    batch, tokens, heads, dim = query.shape
    result = np.zeros(query.shape)
    for b, i, h in np.ndindex(batch, tokens, heads):
        g, row_mask = h // (heads // keys.shape[1]), mask[b % len(mask), i]
        seen_keys = np.concatenate([cached_keys[b, g, : lengths[b]], keys[b, g][row_mask]]).astype(np.float64)
        seen_values = np.concatenate([cached_values[b, g, : lengths[b]], values[b, g][row_mask]]).astype(np.float64)
        scores = seen_keys @ query[b, i, h].astype(np.float64) / np.sqrt(dim)
        weights = np.exp(scores - scores.max())
        result[b, i, h] = weights @ seen_values / weights.sum()
    return result


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


# Numbers


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 40),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 5),
    dim=st.sampled_from([3, 8, 24, 64, 80]),
    slots=st.integers(1, 150),
    shared_mask=st.booleans(),
)
def test_agrees_with_float64(attend, seed, batch, tokens, groups, repeats, dim, slots, shared_mask):
    lengths = np.random.default_rng(seed).choice([0, slots // 2, slots], batch)
    shape = {"batch": batch, "tokens": tokens, "heads": groups * repeats, "groups": groups, "dim": dim, "slots": slots}
    arguments = problem(seed, **shape, lengths=lengths, mask_batch=1 if shared_mask else batch)
    np.testing.assert_allclose(attend(*arguments), float64_attention(*arguments), rtol=1e-5, atol=1e-5)


def test_agrees_with_the_attention_by_xla(attend):
    arguments = [jnp.asarray(a) for a in problem(0, batch=2, tokens=11, lengths=[40, 13], mask_batch=2)]
    np.testing.assert_allclose(attend(*arguments), two_part_attention(*arguments), rtol=1e-5, atol=1e-6)


def test_large_scores(attend):
    """Weights from 1 down to below the smallest float32, and a maximum that would overflow without subtraction."""
    arguments = problem(0, tokens=5)
    arguments[0] *= 60
    np.testing.assert_allclose(attend(*arguments), float64_attention(*arguments), rtol=1e-4, atol=1e-4)


def test_equal_scores_give_the_plain_mean(attend):
    """Queries of zeros see slots 0..9 and themselves with weight 1/11 each."""
    arguments = problem(1, tokens=1, lengths=[10])
    arguments[0][:] = 0
    seen = np.concatenate([arguments[5][0, :, :10], arguments[2][0]], axis=1)
    mean = np.repeat(seen.mean(1), 2, axis=0)
    np.testing.assert_allclose(attend(*arguments)[0, 0], mean, rtol=1e-6, atol=1e-7)


def test_unread_slots_and_hidden_tokens_do_not_matter(attend):
    arguments = problem(2, batch=2, tokens=6, lengths=[0, 17])
    clean = bits(attend(*arguments))
    for b, length in enumerate(arguments[6]):
        arguments[4][b, :, length:] = arguments[5][b, :, length:] = np.nan
    np.testing.assert_array_equal(bits(attend(*arguments)), clean)
    arguments[3][:, :, 3] = False
    hidden = bits(attend(*arguments))
    arguments[1][:, :, 3] = arguments[2][:, :, 3] = np.nan
    np.testing.assert_array_equal(bits(attend(*arguments)), hidden)


def test_a_token_that_sees_nothing_gets_zeros(attend):
    arguments = problem(3, tokens=2, lengths=[0])
    arguments[3][:] = False
    np.testing.assert_array_equal(attend(*arguments), np.zeros((1, 2, 6, 64)))


def test_lengths_outside_the_cache_are_clipped(attend):
    arguments = problem(4, batch=2, tokens=2, lengths=[-5, 1000])
    clipped = [*arguments[:6], np.asarray([0, 40], np.int32)]
    np.testing.assert_array_equal(bits(attend(*arguments)), bits(attend(*clipped)))


# Bits


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dim, heads, groups", [(64, 9, 3), (24, 4, 1), (80, 5, 5), (12, 14, 2)])
@pytest.mark.parametrize("filled", [0, 1, 61, 131])
def test_tree_has_the_bits_of_its_tokens_one_by_one(attend, filled, dim, heads, groups, dtype):
    """Every token again alone, with its ancestors moved into the cache: plain decoding along each path."""
    for tokens, parents in ((7, list(range(-1, 6))), (29, None)):
        arguments = problem(tokens, tokens=tokens, heads=heads, groups=groups, dim=dim, slots=160, lengths=[filled])
        if parents:
            arguments[3] = tree_mask(parents)[None]
        query, keys, values, mask, cached_keys, cached_values, lengths = arguments
        store = [a.astype(dtype) for a in (keys, values, cached_keys, cached_values)]
        together = bits(attend(query, *store[:2], mask, *store[2:], lengths))
        for i in range(tokens):
            path = np.flatnonzero(mask[0, i])
            cache = [old.copy() for old in store[2:]]
            for old, new in zip(cache, store[:2], strict=True):
                old[:, :, filled : filled + len(path) - 1] = new[:, :, path[:-1]]
            own = [new[:, :, i : i + 1] for new in store[:2]]
            alone = attend(query[:, i : i + 1], *own, causal_mask(1), *cache, lengths + len(path) - 1)
            np.testing.assert_array_equal(bits(alone)[:, 0], together[:, i], err_msg=f"token {i} of {tokens}")


def test_prompt_has_the_same_bits_in_chunks_of_any_width(attend):
    """A causal prompt at once, and in chunks that find the earlier ones in the cache."""
    query, keys, values, _, empty, _, _ = problem(5, tokens=70, slots=80)
    whole = bits(attend(query, keys, values, causal_mask(70), empty, empty, np.asarray([0], np.int32)))
    for width in (1, 9, 32):
        for start in range(0, 70, width):
            stop = min(start + width, 70)
            cache = [np.concatenate([new[:, :, :start], empty[:, :, start:]], axis=2) for new in (keys, values)]
            own = [new[:, :, start:stop] for new in (keys, values)]
            part = attend(query[:, start:stop], *own, causal_mask(stop - start), *cache, np.asarray([start], np.int32))
            np.testing.assert_array_equal(bits(part), whole[:, start:stop])


def test_rows_of_a_batch_have_the_same_bits_alone(attend):
    arguments = problem(6, batch=3, tokens=8, lengths=[0, 23, 40], mask_batch=3)
    together = bits(attend(*arguments))
    for b in range(3):
        np.testing.assert_array_equal(bits(attend(*(a[b : b + 1] for a in arguments))), together[b : b + 1])


def test_bfloat16_equals_its_float32_copy(attend):
    arguments = problem(7, tokens=5, dim=20)
    narrow, wide = list(arguments), list(arguments)
    for i in (1, 2, 4, 5):
        narrow[i] = arguments[i].astype(jnp.bfloat16)
        wide[i] = narrow[i].astype(np.float32)
    np.testing.assert_array_equal(bits(attend(*narrow)), bits(attend(*wide)))


# Control flow and errors


def test_inside_jit_while_loop_and_switch(attend):
    """The decode loop's shape: a loop over a switch of trees, the lengths traced and the cache written in between."""
    query, keys, values, mask, cached_keys, cached_values, _ = problem(8, tokens=8, slots=60)

    def branch(tokens):
        def step(lengths, cache, total):
            new = [a[:, :, :tokens] for a in (keys, values)]
            mixed = attend(query[:, :tokens], *new, mask[:, :tokens, :tokens], *cache, lengths)
            at = (0, 0, lengths[0], 0)
            cache = [jax.lax.dynamic_update_slice(old, a, at) for old, a in zip(cache, new, strict=True)]
            return lengths + tokens, cache, total + mixed.sum()

        return step

    branches = [branch(tokens) for tokens in (1, 3, 8)]

    @jax.jit
    def run(lengths, cache):
        def body(carry):
            return carry[0] + 1, *jax.lax.switch(carry[0] % 3, branches, *carry[1:])

        return jax.lax.while_loop(lambda carry: carry[0] < 7, body, (0, lengths, cache, jnp.float32(0)))

    state = (jnp.asarray([5], jnp.int32), [jnp.asarray(cached_keys), jnp.asarray(cached_values)], jnp.float32(0))
    looped = run(*state[:2])
    for i in range(7):
        state = branches[i % 3](*state)
    assert looped[1].tolist() == state[0].tolist() == [5 + 2 * 12 + 1]
    np.testing.assert_allclose(looped[3], state[2], rtol=1e-5)


def test_large_problems_of_several_chunks_per_thread(attend):
    arguments = problem(9, batch=2, tokens=40, heads=12, groups=4, slots=700, lengths=[700, 350])
    np.testing.assert_allclose(attend(*arguments), float64_attention(*arguments), rtol=1e-5, atol=1e-5)


def test_other_dtypes_are_refused(attend):
    query, keys, values, *rest = problem(10, tokens=2)
    with pytest.raises(TypeError, match="bfloat16, float32"):
        attend(query, keys.astype(jnp.bfloat16), values, *rest)
    with pytest.raises(TypeError, match="query must be float32"):
        attend(query.astype(jnp.bfloat16), keys, values, *rest)


@pytest.mark.parametrize("index", range(1, 7))
def test_shapes_that_do_not_fit_are_refused(attend, index):
    """By the native code too: a wrong shape there would read beyond an array."""
    arguments = problem(11, batch=2, tokens=3)
    arguments[index] = np.concatenate([arguments[index]] * 2)[: 3 if index == 3 else 1]
    if index == 3:
        arguments[3] = arguments[3][:, :2]
    call = jax.ffi.ffi_call(tree_attention.KERNEL.target, jax.ShapeDtypeStruct(arguments[0].shape, jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit together"):
        jax.block_until_ready(call(*arguments))


def test_choice_on_a_cpu_is_the_kernel_and_without_a_compiler_xla(attend, tmp_path, monkeypatch):
    assert choose_attend(tmp_path) is tree_attention.attend
    monkeypatch.setattr(tree_attention.KERNEL, "build", lambda cache: False)
    assert choose_attend(tmp_path) is two_part_attention


# The benchmark


def test_benchmark_prints_its_table_and_one_json_line(attend, tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "scripts" / "bench_attention.py"))["main"]
    arguments = ["--repeats", "2", "--cache-dir", str(tmp_path)]
    assert main([*arguments, "--rows", "1", "2", "--filled", "0", "3"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(line["rows"], line["filled"]) for line in results] == [(1, 0), (1, 3), (2, 0), (2, 3)]
    assert all(line[name] == sorted(line[name]) for line in results for name in ("xla", "kernel", "ratio"))
    assert main([*arguments, "--filled", "513"]) == 2
    assert "--filled between 0 and 512" in capsys.readouterr().err
