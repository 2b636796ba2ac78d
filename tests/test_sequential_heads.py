"""MTP modules and Hydra heads against plain NumPy, node by node of a tree that expands other than the lowest ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.errors import UserError
from entmtp_jax.heads.hydra import build_hydra, prepare_hydra
from entmtp_jax.heads.hydra_layers import HydraConfig, HydraHeads, init_hydra, repeat_backbone
from entmtp_jax.heads.interface import Features, Shared
from entmtp_jax.heads.mtp import build_mtp, prepare_mtp
from entmtp_jax.heads.mtp_layers import MTPConfig, init_modules
from entmtp_jax.testing.reference import reference_layer, reference_norm
from entmtp_jax.testing.tiny import TINY_CONFIG
from entmtp_jax.topology import Topology

V, D = TINY_CONFIG.vocab_size, TINY_CONFIG.hidden_size
LENGTH, TOP_K = 7, 4
TREE = Topology("odd", parents=(-1, 0, 0, 1, 1, 4, 2, 4), ranks=(0, 0, 1, 0, 1, 0, 0, 1))
DRAFT_IDS = np.random.default_rng(0).permutation(V)[:40].astype(np.int32)


def enlarged(params):
    """Weights so large that whatever is read changes the scores; norm scales and biases away from 1 and 0."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    noise = [0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(
        structure, [8 * leaf if leaf.ndim > 1 else leaf + add for leaf, add in zip(leaves, noise, strict=True)]
    )


@pytest.fixture(scope="module")
def text():
    """Hidden states before and after the norm, tokens with the root last, and the backbone's matrices, of two rows."""
    rng = np.random.default_rng(1)
    hidden, normed = rng.normal(size=(2, 2, LENGTH, D)).astype(np.float32)
    tokens = rng.integers(0, V, (2, LENGTH + 1))
    embedding, output = rng.normal(size=(2, V, D)).astype(np.float32)
    return hidden, normed, tokens, Shared(jnp.asarray(embedding), jnp.asarray(output))


def draft(head, params, text):
    """The tree of ``TREE`` after the text was taken in, in chunks of 4 and 3."""
    hidden, normed, tokens, shared = text
    state, advance = head.init_state(2, 16), jax.jit(head.advance)
    for part in (slice(0, 4), slice(4, 7)):
        features = Features(jnp.asarray(hidden[:, part]), jnp.asarray(normed[:, part]), ())
        positions = jnp.broadcast_to(jnp.arange(LENGTH)[part], features.hidden.shape[:2])
        following = jnp.asarray(tokens[:, 1:][:, part])
        valid = jnp.ones(positions.shape, bool)
        current = jnp.asarray(tokens[:, :-1][:, part])
        state = advance(params, shared, state, features, current, following, positions, valid)
    root = jnp.asarray(tokens[:, -1])

    @jax.jit
    def complete(params, state):
        proposal = head.propose(params, shared, state, root, TREE.depth)
        return head.complete(params, shared, state, root, proposal, TREE)

    return jax.device_get(complete(params, state))


def check_nodes(drafted, ids, logits_below):
    """Every node against ``logits_below(row, tokens of its parent's path, the root left out)``."""
    for row in range(2):
        for node in range(1, TREE.num_rows):
            path = [int(drafted.tokens[row, step]) for step in TREE.row_paths[node][1 : TREE.depths[node]]]
            logits = logits_below(row, path)
            column = np.argsort(-logits)[TREE.ranks[node]]
            assert drafted.tokens[row, node] == ids[column], (row, TREE.rank_path(node))
            logprob = logits[column] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            np.testing.assert_allclose(drafted.logprobs[row, node], logprob, rtol=1e-3, atol=1e-3)


def numpy_mtp(config, modules, text, row, path):
    """Logits of the scored ids below a path: one causal pass over the text's entries and the path's."""
    hidden, normed, tokens, shared = text
    block = config.block(TINY_CONFIG)
    states = list((normed if config.normed_hidden else hidden)[row].astype(np.float64))
    following = [*tokens[row, 1:], *path]
    for level in range(len(path) + 1):
        module = modules[min(level, config.num_modules - 1)]
        entries = []
        for state, token in zip(states, following, strict=False):
            parts = [
                reference_norm(block, module["embedding_norm"], np.asarray(shared.embedding, np.float64)[token]),
                reference_norm(block, module["hidden_norm"], state),
            ]
            joined = np.concatenate(parts if config.embedding_first else parts[::-1])
            entries.append(np.asarray(module["projection"], np.float64) @ joined)
        output = reference_layer(block, module["layer"], np.stack(entries))[-1]
        scored = reference_norm(block, module["final_norm"], output)
        states.append(scored if config.normed_hidden else output)
    return np.asarray(shared.output, np.float64) @ scored


@pytest.mark.parametrize(
    "config",
    [
        MTPConfig(D, V, 40, max_depth=3, draft_vocab_size=len(DRAFT_IDS)),
        MTPConfig(D, V, 40, max_depth=3, embedding_first=False, normed_hidden=False),
        MTPConfig(D, V, 40, max_depth=3, num_modules=2),  # the second one from level 1 on
    ],
    ids=["embedding first, normed, subset", "hidden first, before the norm", "two modules"],
)
def test_mtp_modules_equal_numpy(text, config):
    modules = enlarged(init_modules(config, config.block(TINY_CONFIG), jax.random.key(2)))
    ids = None if config.draft_vocab_size is None else DRAFT_IDS
    params = prepare_mtp({"modules": modules}, ids, text[3])
    drafted = draft(build_mtp(config, TINY_CONFIG, top_k=TOP_K), params, text)
    scored = np.arange(V) if ids is None else ids
    check_nodes(drafted, scored, lambda row, path: numpy_mtp(config, modules, text, row, path)[scored])


def numpy_hydra(config, params, text, row, path):
    """Logits of all ids, or of the heads' own output matrix, below a path."""
    _, normed, tokens, shared = text
    state = normed[row].astype(np.float64)
    if config.prefix:
        block = config.block(TINY_CONFIG)
        state = reference_layer(block, params["prefix"]["layer"], state)
        state = reference_norm(block, params["prefix"]["norm"], state)
    embedded = [np.asarray(shared.embedding, np.float64)[token] for token in (tokens[row, -1], *path)]
    head = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["heads"][f"head_{len(path)}"])

    def affine(name, x):
        return head[name]["kernel"] @ x + head[name]["bias"]

    def silu(x):
        return x / (1 + np.exp(-x))

    joined = np.concatenate([state[-1], *embedded])
    x = affine("skip", joined) + silu(affine("entry", joined))
    for _ in range(config.num_layers - 1):
        x = x + silu(affine("residual", x))
    return affine("output", x) if config.own_output else np.asarray(shared.output, np.float64) @ x


HYDRA = {
    "hydra": HydraConfig(D, V, num_heads=3, num_layers=1, prefix=False),
    "hydra, own output": HydraConfig(D, V, num_heads=3, num_layers=3, prefix=False, own_output=True),
    "hydra++, subset": HydraConfig(D, V, 3, 2, intermediate_size=24, draft_vocab_size=len(DRAFT_IDS)),
}


@pytest.mark.parametrize("name", HYDRA)
def test_hydra_heads_equal_numpy(text, name):
    config = HYDRA[name]
    trained = enlarged(init_hydra(config, config.block(TINY_CONFIG), jax.random.key(4)))
    ids = None if config.draft_vocab_size is None else DRAFT_IDS
    params = prepare_hydra(config, trained, ids, text[3])
    head = build_hydra(config, TINY_CONFIG, top_k=TOP_K)
    assert head.name == name.split(",")[0] and head.max_depth == 3
    drafted = draft(head, params, text)
    scored = np.arange(V) if ids is None else ids
    check_nodes(drafted, scored, lambda row, path: numpy_hydra(config, trained, text, row, path)[scored])


def test_a_head_runs_on_whole_sequences_in_training():
    """Leading axes are free: the states of many places at once are those of each alone."""
    config = HYDRA["hydra"]
    params = enlarged(init_hydra(config, config.block(TINY_CONFIG), jax.random.key(4)))["heads"]
    rng = np.random.default_rng(3)
    prefix, path = rng.normal(size=(2, 5, D)), rng.normal(size=(2, 5, 3, D))
    module = HydraHeads(config)
    together = np.asarray(module.apply({"params": params}, jnp.asarray(prefix), jnp.asarray(path)))
    alone = np.asarray(module.apply({"params": params}, jnp.asarray(prefix[1, 4]), jnp.asarray(path[1, 4])))
    assert together.shape == (2, 5, D)
    np.testing.assert_allclose(together[1, 4], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HYDRA)
def test_fresh_heads_repeat_the_backbones_own_guess(text, name):
    """Training starts from p = normed states of their own size, so every head's scores are the backbone's."""
    config = HYDRA[name]
    size = np.sqrt((text[1] ** 2).mean())
    ids = np.arange(V) if config.draft_vocab_size is None else DRAFT_IDS
    rows = text[3].output[ids]
    random = init_hydra(config, config.block(TINY_CONFIG), jax.random.key(5))
    trained = repeat_backbone(config, random, norm_scale=float(size), rows=rows)
    assert jax.tree.structure(trained) == jax.tree.structure(random)
    params = prepare_hydra(config, trained, None if config.draft_vocab_size is None else ids, text[3])
    drafted = draft(build_hydra(config, TINY_CONFIG, top_k=TOP_K), params, text)
    for row in range(2):
        best = ids[np.argsort(-(np.asarray(rows) @ text[1][row, -1]))]
        assert [drafted.tokens[row, n] for n in range(1, 8)] == [best[rank] for rank in TREE.ranks[1:]]


def test_the_size_of_the_prefix_is_given():
    config = HYDRA["hydra++, subset"]
    random = init_hydra(config, config.block(TINY_CONFIG), jax.random.key(5))
    scale = jnp.arange(float(D))
    params = repeat_backbone(config, random, norm_scale=scale, rows=jnp.zeros((len(DRAFT_IDS), D)))
    assert params["prefix"]["norm"]["scale"].tolist() == scale.tolist()
    assert not params["prefix"]["layer"]["mlp"]["down"].any()
    assert params["prefix"]["layer"]["mlp"]["gate_up"].any(), "what is zero on both sides never learns"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HydraConfig(D, V), "intermediate size"),
        (lambda: HydraConfig(D, V, num_heads=0, prefix=False), "at least one head"),
        (lambda: HydraConfig(D, V, prefix=False, draft_vocab_size=V + 1), "draft vocabulary of 62"),
        (lambda: MTPConfig(D, V, 40, max_depth=2, num_modules=3), "no more than levels"),
        (lambda: MTPConfig(D, V, 40, draft_vocab_size=0), "draft vocabulary of 0"),
        (lambda: build_mtp(MTPConfig(D, V, 40, draft_vocab_size=5), TINY_CONFIG, top_k=6), "score only 5 ids"),
        (lambda: build_hydra(HYDRA["hydra"], TINY_CONFIG, top_k=V + 1), "score only 61 ids"),
    ],
)
def test_impossible_shapes_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
