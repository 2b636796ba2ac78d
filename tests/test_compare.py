"""The compare command: hand-worked figures from written traces, cost of drafting on the tiny model, wrong input."""

import json

import numpy as np
import pytest

from entmtp_jax.bank import Bank, save_bank
from entmtp_jax.calibration.replay import Trace
from entmtp_jax.calibration.trace import UNRANKED
from entmtp_jax.calibration.trace_file import TraceFile, TraceHeader, save_trace
from entmtp_jax.cli import run_main
from entmtp_jax.commands.compare import main
from entmtp_jax.commands.compare_run import accuracy_by_depth
from entmtp_jax.topology import Topology, chain

MISS = UNRANKED
# One text of 6 tokens: five places where a step can start. Ranks of the next two tokens at each.
RANKS = [[0, 0], [0, 1], [1, 0], [0, MISS], [MISS, MISS]]
PAIR = Topology.from_paths("pair", [(0,), (1,)])


def write(path, ranks, *, model="nowhere", heads="lookup", new_tokens=6):
    ranks = np.asarray(ranks, np.int32)
    count, depth = ranks.shape
    ones = np.ones(count, np.float32)
    trace = Trace(
        ranks=ranks,
        chain_logprobs=np.zeros((count, depth), np.float32),
        entropy_nats=ones,
        top1_prob=ones,
        outside_loops=np.arange(count) < 2,
        agrees=np.ones(count, bool),
        new_tokens=np.asarray([new_tokens], np.int32),
    )
    header = TraceHeader(model, "backbone", heads, heads, "head", "float32", depth, 8, {})
    save_trace(path, TraceFile(header, trace, ["one"], ["a"], ["length"]))
    return path


@pytest.fixture
def bank(tmp_path):
    save_bank(Bank("two", (chain(2), PAIR)), tmp_path / "two.json")
    return str(tmp_path / "two.json")


def compare(capsys, *arguments):
    code = run_main(lambda: main([*map(str, arguments)]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_figures_by_hand(tmp_path, bank, capsys):
    """chain2 from token 0: keeps 2, emits 3; then one step at place 3 keeps 1, emits 2: 6 tokens in 2 steps."""
    trace = write(tmp_path / "t.npz", RANKS)
    code, out, _ = compare(capsys, trace, "--bank", bank, "--no-costs")
    found = json.loads(out.splitlines()[-1])["heads"]["lookup"]
    assert code == 0
    assert found["replay"]["one"]["chain2"]["tokens_per_step"] == 3.0
    # pair: places 0, 2 and 4 keep 1, 1 and 0 drafts: three steps; of them the first is outside loops.
    assert found["replay"]["one"]["pair"]["tokens_per_step"] == 2.0
    assert found["replay"]["one"]["pair"]["tokens_per_step_outside_loops"] == 2.0
    assert found["accuracy"]["one"] == [3 / 5, 2 / 5]
    assert "| lookup | chain2 | 3.00 (3.00) |" in out and "| lookup | 60.0 / 40.0 |" in out


def test_a_head_is_left_out_of_topologies_deeper_than_it_drafts(tmp_path, bank, capsys):
    trace = write(tmp_path / "t.npz", [row[:1] for row in RANKS])
    code, out, _ = compare(capsys, trace, "--bank", bank, "--no-costs")
    assert code == 0 and list(json.loads(out.splitlines()[-1])["heads"]["lookup"]["replay"]["one"]) == ["pair"]


def test_accuracy_of_nothing_is_nothing():
    empty = np.zeros(0)
    assert accuracy_by_depth(Trace(np.zeros((0, 2)), np.zeros((0, 2)), empty, empty, empty, empty, empty)) == []


def test_cost_of_drafting_on_the_tiny_model(tmp_path, bank, tiny_model, capsys):
    trace = write(tmp_path / "t.npz", RANKS, model=str(tiny_model))
    arguments = ["--bank", bank, "--cost-topology", "pair", "--cache-dir", str(tmp_path / "cache")]
    code, out, _ = compare(capsys, trace, *arguments, "--json", tmp_path / "out.json")
    cost = json.loads((tmp_path / "out.json").read_text())["costs"]["lookup"]
    assert code == 0 and all(0 < low <= middle <= high for low, middle, high in (cost["draft"], cost["verify"]))
    assert cost["share"] == (cost["draft"][1] + cost["advance"][1]) / cost["verify"][1]
    assert "pair (3 rows)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.npz"], "missing.npz"),
        (["a.npz", "b.npz"], "b.npz: holds other texts than a.npz"),
        (["a.npz", "a.npz"], "two traces are of heads named 'lookup'"),
        (["a.npz", "--bank", "nowhere"], "bank 'nowhere' is neither a file nor a shipped bank"),
        (["a.npz", "--cost-topology", "nowhere"], "no topology 'nowhere'"),
        (["a.npz", "--bank", "deep.json"], "no topology of bank 'deep' fits its depth 2"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, bank, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.npz", RANKS)
    write(tmp_path / "b.npz", RANKS[:4], heads="medusa", new_tokens=5)
    save_bank(Bank("deep", (chain(3),)), tmp_path / "deep.json")
    if "--bank" not in arguments:
        arguments = [*arguments, "--bank", bank]
    code, _, err = compare(capsys, *arguments)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
