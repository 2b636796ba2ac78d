"""The checks of compiled programs find what is planted in small programs, and nothing where nothing is planted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from entmtp_jax.backbone.cache import KVCache, write_rows
from entmtp_jax.report.compiled import cache_sized_copies, conditionals, host_transfers

SHAPE, STACKED = (1, 2, 64, 8), (3, 1, 2, 64, 8)


def compiled_text(function, *args, donate=()) -> str:
    text = jax.jit(function, donate_argnums=donate).lower(*args).compile().as_text()
    assert text is not None
    return text


def cache_of(shape, dtype=jnp.float32) -> KVCache:
    return KVCache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def loop(step):
    """A loop that carries a cache, three steps long."""
    return lambda cache, length: jax.lax.fori_loop(0, 3, lambda i, carry: step(carry, length + i), cache)


def update(cache, length):
    """What a decoding step does: reads the cache, then writes one slot in place."""
    new = jax.tree.map(lambda slots: slots.mean(-2, keepdims=True) + 1, cache)
    return write_rows(cache, new, jnp.broadcast_to(length, 1))


def through_a_switch(cache, length):
    """The fault that the loop must not have: each branch writes its own number of slots and returns the cache."""

    def write(kept, count):
        new = jax.tree.map(lambda slots: jnp.tile(slots.mean(-2, keepdims=True), (count, 1)), kept)
        return write_rows(kept, new, jnp.broadcast_to(length, 1)), new.keys.sum()

    branches = [functools.partial(write, count=count) for count in (1, 2)]
    written, total = jax.lax.switch(length % 2, branches, cache)
    return jax.tree.map(lambda slots: slots.at[(0,) * slots.ndim].set(total), written)


def rewritten(cache, length):
    """A whole new cache for one slot."""
    here = (jnp.arange(SHAPE[-2]) == length)[:, None]
    return jax.tree.map(lambda slots: jnp.where(here, jnp.roll(slots, 1, axis=-1), slots), cache)


def test_a_program_on_the_device_alone_has_no_transfers():
    assert host_transfers(compiled_text(loop(update), cache_of(SHAPE), 3)) == []


@pytest.mark.parametrize("ordered", [False, True])
def test_a_planted_io_callback_is_found(ordered):
    def step(x):
        io_callback(lambda value: None, None, x.sum(), ordered=ordered)
        return x + 1

    text = compiled_text(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: step(x), x), jnp.ones(4))
    assert len(host_transfers(text)) == 1


@pytest.mark.parametrize(
    "plant",
    [
        lambda x: jax.debug.print("{}", x),
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), x),
    ],
    ids=["debug.print", "pure_callback"],
)
def test_other_callbacks_are_found(plant):
    def function(x):
        result = plant(x)
        return x if result is None else result

    assert host_transfers(compiled_text(function, 1.0))


@pytest.mark.parametrize(
    "line",
    [
        "  %infeed.1 = ((f32[3]{0}), token[]) infeed(%token.0)",
        "  ROOT %outfeed.2 = token[] outfeed(%x, %token.0), outfeed_shape=f32[3]{0}",
        "  %send.1 = (f32[3]{0}, u32[], token[]) send(%x, %token.0), channel_id=1, is_host_transfer=true",
        "  %recv-done.4 = (f32[3]{0:T(128)}, token[]) recv-done(%recv.4), channel_id=2, is_host_transfer=true",
    ],
)
def test_transfers_of_other_backends_are_found(line):
    assert host_transfers(f"ENTRY %main (x: f32[3]) -> f32[3] {{\n{line}\n}}") == [line.strip()]


def test_branches_of_a_switch_are_counted():
    def function(index, x):
        y = jax.lax.switch(index, [jnp.sin, jnp.cos, jnp.tanh], x)
        return jax.lax.cond(x[0] > 0, lambda: y, lambda: jnp.sort(y))

    assert sorted(conditionals(compiled_text(function, 1, jnp.ones(4)))) == [2, 3]


def test_a_vmapped_switch_and_one_of_one_branch_are_no_conditionals():
    def switch(index, x):
        return jax.lax.switch(index, [jnp.sin, jnp.cos, jnp.tanh], x)

    assert conditionals(compiled_text(jax.vmap(switch), jnp.arange(3), jnp.ones((3, 4)))) == []
    assert conditionals(compiled_text(lambda i, x: jax.lax.switch(i, [jnp.sin], x), 0, jnp.ones(4))) == []


@pytest.mark.parametrize("shape", [SHAPE, STACKED], ids=["unrolled", "stacked"])
def test_updates_in_place_are_no_copies(shape):
    cache = cache_of(shape)
    assert cache_sized_copies(compiled_text(loop(update), cache, 3, donate=0), cache) == []


@pytest.mark.parametrize("shape", [SHAPE, STACKED], ids=["unrolled", "stacked"])
@pytest.mark.parametrize("fault", [through_a_switch, rewritten])
def test_a_planted_copy_is_found(shape, fault):
    cache = cache_of(shape)
    assert len(cache_sized_copies(compiled_text(loop(fault), cache, 3, donate=0), cache)) >= 2


def test_a_cache_that_is_not_donated_is_copied_once():
    cache = cache_of(SHAPE)
    assert len(cache_sized_copies(compiled_text(loop(update), cache, 3), cache)) == 2


def test_a_layer_sliced_out_of_a_stacked_cache_is_a_copy():
    def layer_of(cache, index):
        return jax.lax.dynamic_index_in_dim(cache.keys, index, keepdims=False)

    cache = cache_of(STACKED)
    assert len(cache_sized_copies(compiled_text(layer_of, cache, 1), cache)) == 1


def test_values_computed_from_the_cache_are_no_copies():
    def scores(cache, query):
        return jnp.einsum("bgxc,bgsc->bgxs", query, cache.keys)  # as many as the cache has elements

    cache = cache_of(SHAPE)
    assert cache_sized_copies(compiled_text(scores, cache, jnp.ones((1, 2, 8, 8))), cache) == []


def test_copies_as_a_tpu_writes_them():
    text = """
%body (p: bf16[1,2,64,8]) -> bf16[1,2,64,8] {
  %p = bf16[1,2,64,8]{2,3,1,0:T(8,128)(2,1)} parameter(0)
  %far = (bf16[1,2,64,8]{3,2,1,0:T(8,128)(2,1)}, bf16[1,2,64,8]{2,3,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%p)
  %near = (bf16[1,2,64,8]{2,3,1,0:T(8,128)S(1)}, bf16[1,2,64,8]{2,3,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%p)
  ROOT %done = bf16[1,2,64,8]{3,2,1,0:T(8,128)(2,1)} copy-done(%far)
}
"""
    cache = jax.eval_shape(lambda: cache_of(SHAPE, jnp.bfloat16))
    found = cache_sized_copies(text, cache)
    assert [line.split(" ")[0] for line in found] == ["%far"]
