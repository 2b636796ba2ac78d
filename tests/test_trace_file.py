"""Traces on disk: what is written is read back, the documentation tells the truth, and other files are refused."""

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.calibration.replay import Trace
from entmtp_jax.calibration.trace import UNRANKED
from entmtp_jax.calibration.trace_file import (
    HEADER_KEYS,
    TraceFile,
    TraceHeader,
    fingerprint_params,
    load_trace,
    save_trace,
)
from entmtp_jax.commands.trace import MAX_TOP_K
from entmtp_jax.errors import UserError
from entmtp_jax.training.npz_files import write_npz

DOCUMENT = (Path(__file__).parent.parent / "docs" / "trace_format.md").read_text(encoding="utf-8")
HEADER = TraceHeader("tiny", "ab" * 8, "runs/own head", "mtp", "cd" * 8, "float32", 3, 10, {"command": "x", "n": 1})


def example(seed=0, new_tokens=(5, 1, 0, 9)):
    rng = np.random.default_rng(seed)
    count = sum(max(n - 1, 0) for n in new_tokens)
    trace = Trace(
        ranks=rng.choice([0, 1, 9, UNRANKED], (count, 3)).astype(np.int32),
        chain_logprobs=-rng.random((count, 3), np.float32),
        entropy_nats=rng.random(count, np.float32),
        top1_prob=rng.random(count, np.float32),
        outside_loops=rng.random(count) < 0.5,
        agrees=rng.random(count) < 0.5,
        new_tokens=np.asarray(new_tokens, np.int32),
    )
    return TraceFile(HEADER, trace, ["a", "a", "b", "ü"], ["1", "2", "3", "Ä/4"], ["eos", "eos", "length", "cache"])


@pytest.fixture
def file(tmp_path):
    save_trace(tmp_path / "t.npz", example())
    return tmp_path / "t.npz"


def test_what_was_saved_is_read_back_bit_for_bit(file):
    read, expected = load_trace(file), example()
    assert (read.header, *read[2:]) == (expected.header, *expected[2:])
    for name, got, wanted in zip(Trace._fields, read.trace, expected.trace, strict=True):
        assert got.dtype == wanted.dtype and got.tolist() == wanted.tolist(), name
    assert [path.name for path in file.parent.iterdir()] == ["t.npz"], "no temporary file stays"


def test_a_trace_without_positions_is_kept_too(tmp_path):
    save_trace(tmp_path / "t.npz", example(new_tokens=(1, 1, 0, 1)))
    assert load_trace(tmp_path / "t.npz").trace.ranks.shape == (0, 3)


def test_ranks_take_one_byte(file):
    stored = np.load(file)
    assert stored["ranks"].dtype == np.uint8 and set(stored["ranks"].ravel().tolist()) <= {0, 1, 9, 255}
    with pytest.raises(UserError, match="up to 255 candidates; got top-k 256"):
        save_trace(file, example()._replace(header=dataclasses.replace(HEADER, top_k=256)))
    assert MAX_TOP_K == 255


def test_the_documented_example_holds(tmp_path):
    """The example holds its own checks; it must reach the last of them."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert code.count("\nassert ") == 3
    exec(compile(code, "trace_format.md", "exec"), {"path": tmp_path / "tiny.npz"})


def test_the_documented_fields_are_those_of_a_file(file):
    rows = re.findall(r"^\| `(\w+)` \| \[(.*?)\] \| (\w+) \|", DOCUMENT, re.MULTILINE)
    stored = np.load(file)
    assert [name for name, *_ in rows] == list(stored.files)
    sizes = {"n": 12, "T": 4, "K": 3, "bytes": len(stored["header"])}
    for name, shape, dtype in rows:
        assert stored[name].shape == tuple(sizes[axis] for axis in shape.split(", ")), name
        assert stored[name].dtype.name.startswith(dtype), name
    (keys,) = re.findall(r"\| key \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", DOCUMENT)
    assert set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in keys.splitlines()))) == set(HEADER_KEYS)


# Files that are refused


def rewritten(file, *changes, **arrays):
    """The same file with some header keys or arrays changed."""
    stored = dict(np.load(file))
    words = json.dumps(json.loads(stored["header"].tobytes()) | dict(changes))
    write_npz(file, stored | {"header": np.frombuffer(words.encode(), np.uint8)} | arrays, compress=False)


WRONG = {
    "truncated": (lambda f: f.write_bytes(f.read_bytes()[:-40]), "damaged or no .npz archive"),
    "no archive": (lambda f: f.write_bytes(b"hello"), "damaged or no .npz archive"),
    "missing": (lambda f: f.unlink(), "no such file"),
    "other archive": (lambda f: np.savez(f, tokens=np.arange(3)), "lacks the array 'header'"),
    "header no JSON": (lambda f: rewritten(f, header=np.zeros(3, np.uint8)), "header is not JSON"),
    "other header": (lambda f: rewritten(f, ("format", "x")), "an archive of another kind"),
    "newer": (lambda f: rewritten(f, ("version", 2)), "trace version 2, but this program reads 1"),
    "unknown key": (lambda f: rewritten(f, ("colour", 2)), "unknown key 'colour'"),
    "no depth": (lambda f: rewritten(f, ("depth", "deep")), "key 'depth' must be"),
    "other miss": (lambda f: rewritten(f, ("miss", 254)), "out of range"),
    "other depth": (lambda f: rewritten(f, ("depth", 4)), r"ranks has shape \(12, 3\), not \(12, 4\)"),
    "short": (lambda f: rewritten(f, top1_prob=np.zeros(11, np.float32)), r"top1_prob has shape \(11,\)"),
    "one text less": (lambda f: rewritten(f, new_tokens=np.asarray([5, 1, 0], np.int32)), "has shape"),
    "other dtype": (lambda f: rewritten(f, entropy_nats=np.zeros(12)), "entropy_nats is float64, not float32"),
    "rank too high": (lambda f: rewritten(f, ranks=np.full((12, 3), 10, np.uint8)), "10 candidates cannot hold 10"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_files_are_refused_in_one_line(file, case):
    change, message = WRONG[case]
    change(file)
    with pytest.raises(UserError, match=message) as error:
        load_trace(file)
    assert "\n" not in str(error.value) and "t.npz" in str(error.value)


def test_a_fingerprint_is_that_of_the_weights():
    params = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.asarray([3])}
    same = {"a": params["a"].astype(jnp.bfloat16), "b": np.asarray([3])}
    others = [{}, {"a": params["a"]}, params | {"a": 2 * params["a"]}, {"c": params["a"], "b": params["b"]}]
    assert fingerprint_params(params) == fingerprint_params(same)
    assert len({fingerprint_params(tree) for tree in [params, *others]}) == 5
