"""The TPU check, run on the CPU as its target: it reports what is there, and finds what the CPU does wrong."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from entmtp_jax.bank import Bank, bank_of, save_bank
from entmtp_jax.errors import UserError
from entmtp_jax.report.ahead_of_time import LoopReport, Memory, Target, check_step, compile_program, faults
from entmtp_jax.testing.tiny import TINY_CONFIG
from entmtp_jax.topology import autoregressive, chain

SCANNED = dataclasses.replace(TINY_CONFIG, scan_layers=True)
TWO = Bank("two", (autoregressive(), chain(2)))
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "tpu_check.py"


def target(config=SCANNED) -> Target:
    return Target(config, num_heads=2, batch=1, capacity=64, placement=SingleDeviceSharding(jax.devices("cpu")[0]))


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The script as a module, for a tiny model; its bank of two is at two.json."""
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.setenv(name, "cpu")  # the script sets these; the test must leave the environment as it was
    spec = importlib.util.spec_from_file_location("tpu_check", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tpu_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MODELS", {"tiny": SCANNED})
    save_bank(TWO, tmp_path / "two.json")
    return module


def test_the_report(script, monkeypatch, tmp_path, capsys):
    """On a CPU scanned layers slice the cache out by copying, so the check must fail there, and only for that."""
    monkeypatch.setattr(script, "find_device", lambda topology: target().placement)
    monkeypatch.setattr(script, "versions", lambda: {"jax": jax.__version__})
    options = ["--bank", str(tmp_path / "two.json"), "--capacity", "64", "--json", str(tmp_path / "out.json")]
    assert script.main(options) == 1
    printed = capsys.readouterr().out
    assert "conditional over the bank's 2 topologies: present" in printed
    assert "host transfers: none" in printed
    assert "FAULT tiny: run copies the cache" in printed
    model = json.loads((tmp_path / "out.json").read_text())["models"]["tiny"]
    assert [step["rows"] for step in model["steps"]] == [1, 3]
    assert all("copies the cache" in fault for fault in model["faults"])


def test_the_cost_counts_every_layer():
    """Against the compiler's count for the same step with all of its layers unrolled."""
    five = dataclasses.replace(TINY_CONFIG, num_layers=5)
    cost = check_step(target(dataclasses.replace(five, scan_layers=True)), chain(2)).cost
    assert cost.flops == pytest.approx(target(five).step(chain(2)).cost.flops, rel=0.02)


def test_matrices_are_bfloat16_and_norms_float32():
    _, (params, state, _) = target(TINY_CONFIG).build(bank_of(chain(2)))
    dtypes = {path[-1].key: leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(params.backbone)}
    assert dtypes.pop("scale") == jnp.float32
    assert set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.cache)} == {jnp.dtype(jnp.bfloat16)}


def test_faults_of_loops():
    memory = Memory(1.0, 1.0, 1.0, 1.0)
    sound = {"run": LoopReport(memory, 1.0, [3, 2], [], []), "prefill": LoopReport(memory, 1.0, [], [], [])}
    assert faults(sound, TWO) == []
    assert faults(sound | {"run": LoopReport(memory, 1.0, [], [], [])}, bank_of(chain(2))) == []
    unsound = {"run": LoopReport(memory, 1.0, [3], ["%a"], []), "prefill": LoopReport(memory, 1.0, [], [], ["%b"])}
    assert faults(unsound, TWO) == [
        "run has no conditional over the 2 topologies",
        "run exchanges data with the host: %a",
        "prefill copies the cache: %b",
    ]


def test_a_topology_that_cannot_be_compiled_for_is_one_clear_line(script):
    """Without libtpu any name is refused; with it, this one is."""
    with pytest.raises(UserError, match="install the extra 'tpu'"):
        script.find_device("v0:1x1")


def test_a_model_that_does_not_fit_says_what_to_do():
    class Full:
        def lower(self):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")

    with pytest.raises(UserError, match="lower --capacity or --batch"):
        compile_program(Full(), [])


def test_with_libtpu_the_loops_keep_their_promises(script, tmp_path, capsys):
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("libtpu is not installed; it comes with the extra 'tpu'")
    assert script.main(["--bank", str(tmp_path / "two.json"), "--capacity", "512"]) == 0
    assert "all checks passed" in capsys.readouterr().out
