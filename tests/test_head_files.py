import dataclasses
import errno
import json
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from entmtp_jax.backbone.precision import linear_highest
from entmtp_jax.backbone.transformer import output_matrix
from entmtp_jax.checkpoints.head_files import load_head, read_head_info, save_head
from entmtp_jax.errors import UserError
from entmtp_jax.heads.interface import Shared
from entmtp_jax.heads.medusa import MedusaConfig, build_medusa, prepare_medusa
from entmtp_jax.heads.mtp_layers import MTPConfig, init_modules
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone

HIDDEN, VOCAB = TINY_CONFIG.hidden_size, TINY_CONFIG.vocab_size
DRAFT_IDS = np.asarray([5, 60, 0, 17, 33, 2, 8], np.int32)


def shape_of(own_output=False, draft=True, num_layers=2):
    size = len(DRAFT_IDS) if draft else None
    return MedusaConfig(HIDDEN, VOCAB, num_heads=3, num_layers=num_layers, draft_vocab_size=size, own_output=own_output)


def random_tensors(shape, seed=0):
    rng = np.random.default_rng(seed)
    sizes = {
        "kernel": (shape.num_heads, shape.num_layers, HIDDEN, HIDDEN),
        "bias": (shape.num_heads, shape.num_layers, HIDDEN),
    }
    if shape.own_output:
        sizes["output"] = (shape.num_heads, shape.num_scored, HIDDEN)
    return {name: rng.normal(size=size).astype(ml_dtypes.bfloat16) for name, size in sizes.items()}


def shared_matrices():
    _, params = tiny_backbone()
    return Shared(embedding=params["embed"]["embedding"], output=output_matrix(params))


def save(folder, shape, tensors, draft_ids=DRAFT_IDS):
    save_head(
        folder,
        shape=shape,
        backbone=TINY_CONFIG,
        params=tensors,
        draft_ids=draft_ids if shape.draft_vocab_size else None,
        backbone_name="tiny",
        backbone_fingerprint="0123456789abcdef",
        draft_vocab={"coverage": 0.9},
        provenance={"seed": 0},
    )


def load(folder, config=TINY_CONFIG, top_k=4):
    return load_head(folder, config, shared_matrices(), top_k=top_k, linear=linear_highest)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", jnp.bfloat16), (None, jnp.float32)])
@pytest.mark.parametrize("own_output", [False, True])
def test_matrices_get_the_dtype_that_is_asked_for_and_biases_stay_float32(tmp_path, own_output, dtype, expected):
    shape = shape_of(own_output)
    save(tmp_path / "heads", shape, random_tensors(shape))
    shared = shared_matrices()
    _, params = load_head(tmp_path / "heads", TINY_CONFIG, shared, top_k=4, linear=linear_highest, dtype=dtype)
    blocks = params["blocks"]
    output = blocks["output"] if own_output else params["output"]
    assert blocks["kernel"].dtype == output.dtype == expected and blocks["bias"].dtype == jnp.float32


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("draft", [False, True])
def test_a_saved_head_proposes_what_it_did_before(tmp_path, own_output, draft):
    shape = shape_of(own_output, draft)
    tensors = random_tensors(shape)
    save(tmp_path / "heads", shape, tensors)
    head, params = load(tmp_path / "heads")
    shared = shared_matrices()
    plain = {name: jnp.asarray(value, jnp.float32) for name, value in tensors.items()}
    expected_params = prepare_medusa(shape, plain, DRAFT_IDS if draft else None, shared)
    expected_head = build_medusa(shape, top_k=4)
    assert (head.name, head.max_depth, head.top_k) == ("medusa", 3, 4)
    state = head.init_state(2, 8)._replace(normed=jax.random.normal(jax.random.key(1), (2, HIDDEN)))
    root = jnp.zeros(2, jnp.int32)
    got = head.propose(params, shared, state, root, 3)
    want = expected_head.propose(expected_params, shared, state, root, 3)
    np.testing.assert_array_equal(got.greedy.tokens, want.greedy.tokens)
    np.testing.assert_array_equal(got.chain_logprobs, want.chain_logprobs)


def test_config_says_what_the_heads_are(tmp_path):
    shape = shape_of()
    save(tmp_path, shape, random_tensors(shape))
    info = read_head_info(tmp_path)
    assert info.shape == shape
    assert (info.kind, info.backbone_name, info.backbone_fingerprint) == ("medusa", "tiny", "0123456789abcdef")
    assert json.loads((tmp_path / "provenance.json").read_text()) == {"seed": 0}


def test_matrices_are_bfloat16_and_other_files_stay(tmp_path):
    (tmp_path / "card.md").write_text("about these heads")
    shape = shape_of()
    save(tmp_path, shape, {name: np.asarray(value, np.float32) for name, value in random_tensors(shape).items()})
    save(tmp_path, shape, random_tensors(shape, seed=1))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["card.md", "config.json", "heads.safetensors", "provenance.json"]
    with safe_open(tmp_path / "heads.safetensors", framework="numpy") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}
    assert dtypes == {"kernel": "BF16", "bias": "F32", "draft_ids": "I32"}


def test_top_k_is_cut_to_the_scored_ids(tmp_path):
    shape = shape_of()
    save(tmp_path, shape, random_tensors(shape))
    head, _ = load(tmp_path, top_k=10)
    assert head.top_k == len(DRAFT_IDS)


def test_half_of_a_new_version_is_noticed(tmp_path):
    shape = shape_of()
    save(tmp_path / "new", shape, random_tensors(shape, seed=1))
    save(tmp_path / "old", shape, random_tensors(shape, seed=2))
    (tmp_path / "new" / "heads.safetensors").rename(tmp_path / "old" / "heads.safetensors")
    with pytest.raises(UserError, match="not the file that config.json describes"):
        load(tmp_path / "old")


def broken_tensors(name):
    shape = shape_of()
    tensors = random_tensors(shape) | {"draft_ids": DRAFT_IDS}
    nan = tensors["bias"].copy()
    nan[0, 0, 0] = np.nan
    changes = {
        "missing": {"bias": None},
        "extra": {"gate": np.zeros(3, np.float32)},
        "misshapen": {"kernel": tensors["kernel"][:2]},
        "integer": {"kernel": tensors["kernel"].astype(np.int32)},
        "nan": {"bias": nan},
        "float ids": {"draft_ids": DRAFT_IDS.astype(np.float32)},
        "repeated ids": {"draft_ids": np.zeros_like(DRAFT_IDS)},
        "ids too large": {"draft_ids": DRAFT_IDS + VOCAB},
    }
    return {key: value for key, value in (tensors | changes[name]).items() if value is not None}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "tensor bias of shape (3, 2, 32) is missing; medusa heads have it"),
        ("extra", "tensor gate has no place in medusa heads"),
        ("misshapen", "tensor kernel has shape (2, 2, 32, 32), but the config and the backbone ask for (3, 2, 32, 32)"),
        ("integer", "tensor kernel has dtype I32"),
        ("nan", "tensor bias holds NaN"),
        ("float ids", "tensor draft_ids has dtype F32"),
        ("repeated ids", "tensor draft_ids must hold different token ids below 61"),
        ("ids too large", "tensor draft_ids must hold different token ids below 61"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, name, message):
    shape = shape_of()
    save(tmp_path, shape, random_tensors(shape))
    save_file(broken_tensors(name), tmp_path / "heads.safetensors")
    with pytest.raises(UserError, match=re.escape(message)):
        load(tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    shape = shape_of()
    save(tmp_path, shape, random_tensors(shape))
    file = tmp_path / "heads.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated or no safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "eagle"}, "unknown kind of heads 'eagle'; known: medusa, hydra, mtp"),
        ({"schema": 9}, "schema 9, but this version reads 1"),
        ({"shape": {"num_heads": 3}}, "key 'hidden_size' is missing"),
        ({"colour": "blue"}, "unknown key 'colour'"),
        ({"backbone": {"name": "tiny"}}, "key 'fingerprint' is missing"),
    ],
)
def test_a_wrong_config_is_explained(tmp_path, change, message):
    shape = shape_of()
    save(tmp_path, shape, random_tensors(shape))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=re.escape(message)):
        load(tmp_path)


def test_impossible_shape_names_the_file(tmp_path):
    shape = shape_of()
    save(tmp_path, shape, random_tensors(shape))
    file = tmp_path / "config.json"
    data = json.loads(file.read_text())
    data["shape"]["num_heads"] = 0
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"config\.json: Medusa heads need at least one head"):
        load(tmp_path)


@pytest.mark.parametrize("change", [{"hidden_size": 64, "head_dim": 16}, {"vocab_size": 99}])
def test_heads_of_another_backbone_are_refused(tmp_path, change):
    shape = shape_of()
    save(tmp_path, shape, random_tensors(shape))
    other = dataclasses.replace(TINY_CONFIG, **change)
    name, value = next(iter(change.items()))
    message = f"trained for tiny with {name} {getattr(TINY_CONFIG, name)}, but the model has {value}"
    with pytest.raises(UserError, match=re.escape(message)):
        load(tmp_path, other)


def test_a_block_of_another_backbone_names_kind_and_backbone(tmp_path):
    """Same width and vocabulary, but other attention heads: only the tensors tell."""
    shape = MTPConfig(HIDDEN, VOCAB, 40, max_depth=3, draft_vocab_size=len(DRAFT_IDS))
    params = {"modules": init_modules(shape, shape.block(TINY_CONFIG), jax.random.key(0))}
    save(tmp_path, shape, params)
    load(tmp_path)
    other = dataclasses.replace(TINY_CONFIG, num_heads=2 * TINY_CONFIG.num_heads)
    with pytest.raises(UserError, match=r"\(mtp heads for tiny\): tensor modules\.0\.\S+ has shape"):
        load(tmp_path, other)


def test_a_full_disk_leaves_the_heads_that_were_there(tmp_path, monkeypatch):
    shape = shape_of()
    save(tmp_path, shape, random_tensors(shape, seed=1))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def half(path, data):
        with open(path, "wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_bytes", half)
    with pytest.raises(UserError, match=r"cannot write .*heads.safetensors: No space left on device"):
        save(tmp_path, shape, random_tensors(shape, seed=2))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_no_folder_and_no_weights_are_one_line_errors(tmp_path):
    with pytest.raises(UserError, match="no such folder of heads"):
        load(tmp_path / "nowhere")
    shape = shape_of()
    save(tmp_path / "heads", shape, random_tensors(shape))
    (tmp_path / "heads" / "heads.safetensors").unlink()
    with pytest.raises(UserError, match="is the folder complete"):
        load(tmp_path / "heads")


def test_params_that_do_not_fit_are_never_written(tmp_path):
    shape = shape_of()
    tensors = random_tensors(shape)
    with pytest.raises(UserError, match="tensor kernel has shape"):
        save(tmp_path / "heads", shape, tensors | {"kernel": tensors["kernel"][:1]})
    assert not (tmp_path / "heads").exists()
