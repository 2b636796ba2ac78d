"""The choice of the matrix product: measured once per machine, then kept beside the compiled programs."""

import json

import jax
import jax.numpy as jnp
import pytest

from entmtp_jax.backbone import precision
from entmtp_jax.backbone.precision import CHOICES_FILE, choose_linear, linear_highest, linear_kernel, probe_s
from entmtp_jax.errors import UserError
from entmtp_jax.kernels import skinny_matmul

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere XLA's product is taken")


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """Two candidates, and the calls of a probe that finds the one named in ``winner`` the fastest."""
    if not skinny_matmul.KERNEL.build(tmp_path):
        pytest.skip(skinny_matmul.KERNEL.reason)
    calls, winner = [], ["kernel"]

    def probe(candidates, dtype):
        calls.append(str(dtype))
        return {name: 1.0 if name == winner[0] else 2.0 for name in candidates}

    monkeypatch.setattr(precision, "probe_s", probe)
    return calls, winner


def test_a_second_start_does_not_measure_again(probes, tmp_path):
    calls, winner = probes
    assert choose_linear("float32", tmp_path) == (linear_kernel, "kernel")
    winner[0] = "xla"  # a busy machine would now find another one, and compile everything anew
    assert choose_linear("float32", tmp_path) == (linear_kernel, "kernel")
    assert choose_linear("bfloat16", tmp_path)[1] == "xla"
    assert choose_linear("float32", tmp_path / "other") == (linear_highest, "xla")
    assert calls == ["float32", "bfloat16", "float32"]
    assert sorted(json.loads((tmp_path / CHOICES_FILE).read_text()).values()) == ["kernel", "xla"]


@pytest.mark.parametrize("content", ["", "[1]", "{"], ids=["empty", "list", "cut off"])
def test_a_broken_file_is_measured_over(probes, tmp_path, content):
    calls, _ = probes
    (tmp_path / CHOICES_FILE).write_text(content)
    assert choose_linear("float32", tmp_path)[1] == "kernel"
    assert choose_linear("float32", tmp_path)[1] == "kernel"
    assert calls == ["float32"]


def test_a_kept_choice_that_cannot_be_had_is_measured_over(probes, tmp_path):
    calls, _ = probes
    choose_linear("float32", tmp_path)
    (key,) = json.loads((tmp_path / CHOICES_FILE).read_text())
    (tmp_path / CHOICES_FILE).write_text(json.dumps({key: "amx"}))
    assert choose_linear("float32", tmp_path)[1] == "kernel"
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_is_no_obstacle(probes, tmp_path, monkeypatch):
    calls, _ = probes

    def refuse(path, data):
        raise UserError(f"cannot write {path}")

    monkeypatch.setattr(precision, "write_json", refuse)
    for _ in range(2):
        assert choose_linear("float32", tmp_path)[1] == "kernel"
    assert len(calls) == 2 and not (tmp_path / CHOICES_FILE).exists()


def test_the_probe_times_every_candidate():
    seconds = probe_s({"once": linear_highest, "twice": lambda x, w: linear_highest(x, w)}, jnp.dtype("float32"))
    assert seconds.keys() == {"once", "twice"} and all(0 < value < 60 for value in seconds.values())
