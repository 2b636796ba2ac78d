"""Heads unrolled in training see exactly what they see when they draft."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.backbone.attention import causal_mask
from entmtp_jax.backbone.cache import init_cache
from entmtp_jax.errors import UserError
from entmtp_jax.heads.hydra import build_hydra
from entmtp_jax.heads.hydra_layers import HydraConfig, init_hydra
from entmtp_jax.heads.interface import Features as HeadFeatures
from entmtp_jax.heads.interface import Shared
from entmtp_jax.heads.mtp import build_mtp
from entmtp_jax.heads.mtp_layers import MTPConfig, init_modules, repeat_backbone
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone
from entmtp_jax.training.data import from_sequences
from entmtp_jax.training.features import Features
from entmtp_jax.training.rollout import hydra_states, mtp_states
from entmtp_jax.training.sequences import PADDING, batch_of_rows, look_ahead, pack, pack_rows

DEPTH = 4
V, D = TINY_CONFIG.vocab_size, TINY_CONFIG.hidden_size


def hidden_states(text):
    backbone, params = tiny_backbone()
    cache = init_cache(TINY_CONFIG, batch=1, slots=1, dtype=jnp.float32)
    tokens = jnp.asarray(text)[None]
    positions = jnp.arange(len(text))[None]
    zero = jnp.zeros(1, jnp.int32)
    return backbone.forward(params, tokens, positions, causal_mask(len(text)), cache, zero).normed[0]


@pytest.fixture(scope="module")
def packed():
    """Three records in two rows, the hidden states in float32."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, V, length).tolist() for length in (9, 7, 12)]
    records = from_sequences(texts, [2, 1, 3])
    features = Features(
        hidden=np.concatenate([np.asarray(hidden_states(text)) for text in texts]),
        record=np.repeat(np.arange(3), records.lengths).astype(np.int32),
        position=np.concatenate([np.arange(n) for n in records.lengths]).astype(np.int32),
    )
    rows = pack_rows(features, records, np.arange(3), np.arange(V, dtype=np.int32), row_length=18, seed=0)
    assert rows.token.shape == (2, 18)
    return texts, records, features, rows


def scaled(params, factor):
    """Weights large enough that a wrong entry changes the scores."""
    return jax.tree.map(lambda x: x * factor if x.ndim > 1 else x, params)


SHAPES = {
    "recursive": MTPConfig(D, V, 48, max_depth=DEPTH),
    "hidden first, before the norm": MTPConfig(D, V, 48, max_depth=DEPTH, embedding_first=False, normed_hidden=False),
    "three modules": MTPConfig(D, V, 48, max_depth=DEPTH, num_modules=3),
}


HYDRA = {
    "hydra": HydraConfig(D, V, num_heads=DEPTH, num_layers=3, prefix=False),
    "hydra++": HydraConfig(D, V, num_heads=DEPTH, num_layers=2, intermediate_size=48),
}


def head_and_states(name):
    """A head with large random weights, and the same head unrolled."""
    key = jax.random.key(1)
    if name in HYDRA:
        config = HYDRA[name]
        block = config.block(TINY_CONFIG)
        params = init_hydra(config, block, key)
        return build_hydra(config, TINY_CONFIG, top_k=5), hydra_states(config, block, DEPTH), params
    config = SHAPES[name]
    block = config.block(TINY_CONFIG)
    params = {"modules": init_modules(config, block, key)}
    return build_mtp(config, TINY_CONFIG, top_k=5), mtp_states(config, block, DEPTH), params


@pytest.mark.parametrize("name", [*SHAPES, *HYDRA])
def test_states_are_what_the_head_drafts_from(packed, name):
    texts, _, features, rows = packed
    embedding = tiny_backbone()[1]["embed"]["embedding"]
    shared = Shared(embedding, embedding)
    head, unrolled, params = head_and_states(name)
    params = scaled(params, 6.0)
    batch = batch_of_rows(rows, features.hidden, np.arange(2), bases=None, random=np.random.default_rng(0))
    states = jax.jit(unrolled)(params, batch, embedding)
    advance, follow = jax.jit(head.advance), jax.jit(head.follow)
    checked = 0
    for index, text in enumerate(texts):
        state = head.init_state(1, len(text) + 1)
        for t in range(len(text) - 1):
            # Hidden states are read the same way before and after the norm: the test hands in one for both.
            hidden = jnp.asarray(features.hidden[features.record == index][t])[None, None]
            tokens = jnp.asarray(text)[None]
            state = advance(
                params,
                shared,
                state,
                HeadFeatures(hidden, hidden, ()),
                tokens[:, t : t + 1],
                tokens[:, t + 1 : t + 2],
                jnp.full((1, 1), t),
                jnp.ones((1, 1), bool),
            )
            row, place = np.argwhere((rows.segment == index) & (rows.position == t))[0]
            base = np.flatnonzero(np.asarray(batch.base)[row] == place)
            ahead = text[t + 2 : t + 1 + DEPTH]
            path = jnp.asarray(ahead + [0] * (DEPTH - len(ahead)))[None]
            found = follow(params, shared, state, tokens[:, t + 1], path)
            for depth in range(len(ahead) + 1):
                if len(base) and depth < DEPTH:
                    logprobs = jax.nn.log_softmax(states[depth][row, base[0]] @ embedding.T)
                    best = np.sort(np.asarray(logprobs))[::-1][:5]
                    np.testing.assert_allclose(np.asarray(found.logprobs)[0, depth], best, rtol=2e-3, atol=2e-4)
                    assert logprobs[found.tokens[0, depth, 0]] == pytest.approx(float(best[0]), abs=1e-3)
                    checked += 1
    assert checked > 60


def test_fresh_modules_repeat_the_backbones_guess(packed):
    _, _, features, rows = packed
    config = SHAPES["recursive"]
    embedding = tiny_backbone()[1]["embed"]["embedding"]
    modules = init_modules(config, config.block(TINY_CONFIG), jax.random.key(0))
    params = {"modules": repeat_backbone(config, modules, norm_scale=1.0)}
    batch = batch_of_rows(rows, features.hidden, np.arange(2), bases=None, random=np.random.default_rng(0))
    states = mtp_states(config, config.block(TINY_CONFIG), DEPTH)(params, batch, embedding)
    hidden = np.take_along_axis(np.asarray(batch.hidden), np.maximum(batch.base, 0)[:, :, None], axis=1)
    expected = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + TINY_CONFIG.norm_eps)
    for state in states:
        np.testing.assert_allclose(state, expected, atol=1e-4)


def test_packing_is_tight_and_complete():
    lengths = np.random.default_rng(0).integers(3, 60, 200).tolist()
    rows = pack(lengths, 128, seed=1)
    assert sorted(index for row in rows for index in row) == list(range(200))
    assert all(sum(lengths[i] for i in row) <= 128 for row in rows)
    assert len(rows) < 1.1 * sum(lengths) / 128 + 1
    assert sorted(len(row) for row in pack([3, 3, 4], 7, seed=0)) == [1, 2]
    with pytest.raises(UserError, match="a record has 9 tokens, but a row holds 8"):
        pack([9], 8, seed=0)


def test_rows_hold_records_with_their_examples(packed):
    texts, records, features, rows = packed
    for index, text in enumerate(texts):
        row, places = np.nonzero(rows.segment == index)
        assert len(set(row)) == 1 and rows.token[row[0], places].tolist() == text
        assert rows.position[row[0], places].tolist() == list(range(len(text)))
        assert features.record[rows.feature[row[0], places]].tolist() == [index] * len(text)
        expected = [records.prompt_length[index] - 1 <= t < len(text) - 2 for t in range(len(text))]
        assert rows.example[row[0], places].tolist() == expected
    assert (rows.feature == PADDING).sum() == 2 * 18 - sum(map(len, texts))


def test_bases_are_examples_and_look_ahead_stays_in_the_record(packed):
    texts, _, features, rows = packed
    batch = batch_of_rows(rows, features.hidden, np.asarray([1, 0]), bases=3, random=np.random.default_rng(0))
    assert batch.base.shape == (2, 3)
    for row, index in enumerate((1, 0)):
        assert all(rows.example[index, place] for place in np.asarray(batch.base)[row])
    for offset in (1, 2, 5):
        ahead = np.asarray(look_ahead(batch, batch.token, batch.base, offset, -7))
        for row, index in enumerate((1, 0)):
            for column, place in enumerate(np.asarray(batch.base)[row]):
                text = texts[rows.segment[index, place]]
                t = rows.position[index, place] + offset
                assert ahead[row, column] == (text[t] if t < len(text) else -7)


def test_a_missing_feature_is_left_out(packed):
    _, records, features, _ = packed
    part = Features(*(field[features.record != 1] for field in features))
    rows = pack_rows(part, records, np.arange(3), np.arange(V, dtype=np.int32), row_length=18, seed=0)
    assert set(np.unique(rows.segment)) == {PADDING, 0, 2}
    with pytest.raises(UserError, match="no record with stored hidden states"):
        pack_rows(part, records, np.asarray([1]), np.arange(V, dtype=np.int32), row_length=18, seed=0)


def test_a_config_says_what_is_wrong():
    with pytest.raises(UserError, match="at least one module and no more than levels"):
        dataclasses.replace(SHAPES["recursive"], num_modules=9)
