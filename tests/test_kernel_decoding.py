"""The whole model on both CPU kernels: a tree's logits have the bits of plain decoding's, so its text is the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.backbone.cache import init_cache, write_rows
from entmtp_jax.backbone.precision import linear_kernel
from entmtp_jax.backbone.transformer import build_backbone
from entmtp_jax.decode import DecodeConfig, build_decoder
from entmtp_jax.generation import generate
from entmtp_jax.kernels import skinny_matmul, tree_attention
from entmtp_jax.scheduler import force
from entmtp_jax.state import Request
from entmtp_jax.testing.heads import replay_head
from entmtp_jax.testing.tiny import TINY_CONFIG
from tests.decoding import BANK, CAPACITY, CHUNK, PROMPTS, fixed_policy, model_params, noisy_ranks, tiny

TEXT = np.random.default_rng(0).integers(0, TINY_CONFIG.vocab_size, 40)
SLOTS = 64
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    """The tiny backbone with every matrix product and all attention in the kernels."""
    cache = tmp_path_factory.mktemp("kernels")
    for module in (skinny_matmul, tree_attention):
        if not module.KERNEL.build(cache):
            pytest.skip(f"no kernel here: {module.KERNEL.reason}")
    return build_backbone(TINY_CONFIG, linear=linear_kernel, attend=tree_attention.attend)


@pytest.fixture
def one_pass(backbone):
    """``(params, tokens[T], depths[T], mask[T, T], cache, length) -> (logits bits[T, V], new)``, one row."""

    @jax.jit
    def run(params, tokens, positions, mask, cache, lengths):
        out = backbone.forward(params, tokens, positions, mask, cache, lengths)
        return backbone.unembed(params, out.normed), out.new

    def with_bits(params, tokens, depths, mask, cache, length):
        arguments = (jnp.asarray(tokens, jnp.int32)[None], length + jnp.asarray(depths)[None], jnp.asarray(mask)[None])
        logits, new = run(params, *arguments, cache, jnp.asarray([length], jnp.int32))
        return np.asarray(logits)[0].view(np.uint32), new

    return with_bits


def params_of(dtype):
    _, params = tiny()
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params)


def read_text(one_pass, dtype, widths):
    """Bits of the logits at every position of a text that is read in passes of these widths, and the cache."""
    params = params_of(dtype)
    cache, start, rows = init_cache(TINY_CONFIG, batch=1, slots=SLOTS, dtype=dtype), 0, []
    for width in widths:
        tokens = TEXT[start : start + width]
        bits, new = one_pass(params, tokens, np.arange(width), np.tri(width, dtype=bool), cache, start)
        cache = write_rows(cache, new, jnp.asarray([start], jnp.int32))
        rows, start = [*rows, bits], start + width
    return np.concatenate(rows), cache


@pytest.mark.parametrize("widths", [[40], [8] * 5, [3] * 13 + [1], [1, 2, 4, 16, 17]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_has_the_same_bits_in_passes_of_every_width(one_pass, dtype, widths):
    plain, plain_cache = read_text(one_pass, dtype, [1] * 40)
    wide, wide_cache = read_text(one_pass, dtype, widths)
    np.testing.assert_array_equal(wide, plain)
    for one, other in zip(jax.tree.leaves(wide_cache), jax.tree.leaves(plain_cache), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("topology", BANK.topologies, ids=lambda topology: topology.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_node_has_the_bits_of_its_path_read_token_by_token(one_pass, dtype, topology):
    length, params = 20, params_of(dtype)
    _, committed = read_text(one_pass, dtype, [length])
    candidates = np.random.default_rng(1).integers(0, TINY_CONFIG.vocab_size, topology.num_rows)
    tree, _ = one_pass(params, candidates, topology.depths, topology.self_mask, committed, length)
    for row in range(topology.num_rows):
        cache, logits = committed, None
        for depth, node in enumerate(root_path(topology, row)):
            logits, new = one_pass(params, candidates[[node]], [0], [[True]], cache, length + depth)
            cache = write_rows(cache, new, jnp.asarray([length + depth], jnp.int32))
        np.testing.assert_array_equal(tree[[row]], logits, err_msg=f"row {row}")


def root_path(topology, row):
    """Rows from the root to a row."""
    return [*(root_path(topology, topology.parents[row]) if row else []), row]


@functools.cache
def kernel_decoder(backbone):
    head = replay_head(vocab_size=TINY_CONFIG.vocab_size)
    return build_decoder(backbone, head, BANK, DecodeConfig(capacity=CAPACITY, chunk=CHUNK))


POLICIES = {topology.name: fixed_policy(index) for index, topology in enumerate(BANK.topologies)}
POLICIES["all in turn"] = force(fixed_policy(0), [4, 0, 3, 1, 2] * 8)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_tree_writes_plain_decodings_tokens(backbone, policy):
    request = Request(PROMPTS[2], max_new_tokens=60)
    params = model_params("replay", [PROMPTS[2]], noisy_ranks())
    plain = generate(kernel_decoder(backbone), params, [request], fixed_policy(0)).completions[0]
    tree = generate(kernel_decoder(backbone), params, [request], POLICIES[policy]).completions[0]
    assert tree.tokens == plain.tokens and len(plain.tokens) == 60
    assert tree.steps < plain.steps or policy == "ar", "drafts must be accepted"
