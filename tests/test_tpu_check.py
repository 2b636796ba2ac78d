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

from entmtp_jax.bank import Bank, bank_of, save_bank
from entmtp_jax.errors import UserError
from entmtp_jax.testing.tiny import TINY_CONFIG
from entmtp_jax.topology import autoregressive, chain

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "tpu_check.py"


@pytest.fixture
def script(monkeypatch):
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.setenv(name, "cpu")  # the script sets these; the test must leave the environment as it was
    spec = importlib.util.spec_from_file_location("tpu_check", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tpu_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MODELS", {"tiny": TINY_CONFIG})
    return module


def test_the_report_of_a_run(script, monkeypatch, tmp_path, capsys):
    """On a CPU scanned layers slice the cache out by copying, so the check must fail there, and only for that."""
    monkeypatch.setattr(script, "find_device", lambda topology: jax.devices("cpu")[0])
    monkeypatch.setattr(script, "versions", lambda: {"jax": jax.__version__})
    save_bank(Bank("two", (autoregressive(), chain(2))), tmp_path / "two.json")
    options = ["--bank", str(tmp_path / "two.json"), "--capacity", "64", "--json", str(tmp_path / "out.json")]
    assert script.main(options) == 1
    printed = capsys.readouterr().out
    assert "conditional over the bank: present (branches: [2])" in printed
    assert "host transfers in run: none" in printed
    assert "a check FAILED" in printed
    model = json.loads((tmp_path / "out.json").read_text())["models"]["tiny"]
    assert [step["rows"] for step in model["steps"]] == [1, 3]
    assert model["run"]["host_transfers"] == {"run": [], "prefill": []}
    assert model["run"]["cache_copies"]["run"]


def test_the_cost_counts_every_layer(script):
    """Against the compiler's count for the same step with all of its layers unrolled."""
    config = dataclasses.replace(TINY_CONFIG, num_layers=5)
    scanned = script.Target(dataclasses.replace(config, scan_layers=True), 1, 64, jax.devices("cpu")[0])
    unrolled = dataclasses.replace(scanned, config=config)
    cost = script.check_step(scanned, chain(2))["cost"]
    assert cost["flops"] == pytest.approx(unrolled.step(chain(2)).cost()["flops"], rel=0.02)


def test_matrices_are_bfloat16_and_norms_float32(script):
    _, (params, state, _) = script.Target(TINY_CONFIG, 1, 64, jax.devices("cpu")[0]).build(bank_of(chain(2)))
    dtypes = {path[-1].key: leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(params.backbone)}
    assert dtypes.pop("scale") == jnp.float32
    assert set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.cache)} == {jnp.dtype(jnp.bfloat16)}


def test_a_topology_that_cannot_be_compiled_for_is_one_clear_line(script):
    """Without libtpu any name is refused; with it, this one is."""
    with pytest.raises(UserError, match="install the extra 'tpu'"):
        script.find_device("v0:1x1")


def test_a_model_that_does_not_fit_says_what_to_do(script):
    class Full:
        def lower(self):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")

    with pytest.raises(UserError, match="lower --capacity or --batch"):
        script.compile_program(Full(), [])


def test_with_libtpu_the_run_is_sound(script, tmp_path, capsys):
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("libtpu is not installed; it comes with the extra 'tpu'")
    save_bank(Bank("two", (autoregressive(), chain(2))), tmp_path / "two.json")
    assert script.main(["--bank", str(tmp_path / "two.json"), "--capacity", "512"]) == 0
    assert "all checks passed" in capsys.readouterr().out
