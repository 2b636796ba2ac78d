"""The trace command in-process on the tiny model: a trace, its replay, a bank fitted on it, and bad input."""

import json

import jax
import numpy as np
import pytest

from entmtp_jax.assemble import load_draft, load_model
from entmtp_jax.bank import Bank, load_bank, save_bank
from entmtp_jax.calibration.trace_file import load_trace
from entmtp_jax.checkpoints.head_files import save_head
from entmtp_jax.checkpoints.head_kinds import expected_params
from entmtp_jax.cli import run_main
from entmtp_jax.commands import calibrate
from entmtp_jax.commands.trace import main
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.generation import generate
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.report.stats import outside_loops, steps_outside_loops
from entmtp_jax.scheduler import fixed
from entmtp_jax.state import Request
from entmtp_jax.testing.reference import reference_decode
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone
from entmtp_jax.topology import autoregressive, chain
from entmtp_jax.training.data import from_sequences, save_records
from entmtp_jax.training.examples import held_out_records
from entmtp_jax.training.npz_files import write_npz
from tests.model_folder import EOS

BANK = Bank("pair", (autoregressive(), chain(3)))
PROMPTS = {
    "a": {"a/0": "w3 w1 w4 w1 w5", "a/1": "w7 w7 w7 w7", "a/2": "w9 w2"},
    "b": {"b/0": "w2 w3 w2 w3 w2", "b/long": "w1 " * 90, "b/1": "w8"},
}
CHOSEN = ["a/0", "a/1", "b/0", "b/1"]  # the first two of each set that fit
COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    """Prompt files, a bank, and a lookup trace of them."""
    place = tmp_path_factory.mktemp("trace")
    for name, prompts in PROMPTS.items():
        lines = [json.dumps({"id": id, "prompt": prompt}) + "\n" for id, prompt in prompts.items()]
        (place / f"{name}.jsonl").write_text("".join(lines))
    save_bank(BANK, place / "bank.json")
    assert run_main(lambda: main([*command(place, tiny_model), "--out", str(place / "t.npz")])) == 0
    return place


def command(folder, model, *, heads="lookup"):
    sets = [word for name in PROMPTS for word in ("--set", f"{name}={folder / name}.jsonl")]
    limits = ["--prompts-per-set", "2", "--max-new-tokens", str(COUNT), "--capacity", "96", "--batch-size", "3"]
    return [*sets, *limits, "--model", str(model), "--heads", heads, "--cache-dir", str(folder / "cache")]


def ids_of(words):
    return [int(word[1:]) for word in words.split()]


def plain(prompt):
    _, params = tiny_backbone()
    return reference_decode(TINY_CONFIG, params, prompt, max_new_tokens=COUNT, eos_ids=(EOS,))


def test_the_trace_is_of_plain_decodings_texts(folder):
    read = load_trace(folder / "t.npz")
    assert read.ids == CHOSEN and read.sets == ["a", "a", "b", "b"]
    texts = [plain(ids_of((PROMPTS["a"] | PROMPTS["b"])[id])) for id in CHOSEN]
    assert read.finish_reasons == [text.finish_reason for text in texts]
    assert read.trace.new_tokens.tolist() == [len(text.tokens) for text in texts]
    assert read.trace.outside_loops.tolist() == [bool(x) for text in texts for x in outside_loops(text.tokens)[1:]]
    header = read.header
    assert (header.heads, header.head_kind, header.dtype) == ("lookup", "lookup", "float32")
    assert (header.depth, header.top_k) == (16, 10) and header.model.endswith("tiny")
    assert header.made_by["command"].startswith("python scripts/trace.py --set a=")


def test_its_replay_has_the_figures_of_real_decoding(folder, tiny_model, capsys):
    """The printed table and document, without a model, against the loop on the same prompts."""
    argv = ["--replay", str(folder / "t.npz"), "--bank", str(folder / "bank.json"), "--time-policies", "5"]
    assert run_main(lambda: main(argv)) == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert document["timing"]["policies"] == 5 and "5 drawn policies over" in err
    model = load_model(str(tiny_model), dtype="float32", cache=folder / "cache", notify=print)
    draft = load_draft(model, "lookup", BANK, notify=print)
    decoder = build_decoder(model.backbone, draft.head, BANK, DecodeConfig(capacity=96))
    for index, topology in enumerate(BANK.topologies):
        policy = fixed(index, num_topologies=2)
        for name in PROMPTS:
            requests = [
                Request(ids_of(PROMPTS[name][id]), COUNT, model.config.eos_ids) for id in CHOSEN if id.startswith(name)
            ]
            params = ModelParams(model.params, draft.params)
            runs = [generate(decoder, params, [request], policy).completions[0] for request in requests]
            outside = [steps_outside_loops(run) for run in runs]
            steps = sum(run.steps for run in runs)
            row = document["sets"][name][topology.name]
            assert row["steps"][index] == sum(row["steps"]) == steps
            assert row["tokens_per_step"] == sum(len(run.tokens) for run in runs) / steps
            assert row["accepted_per_step"] == sum(int(run.accepted.sum()) for run in runs) / steps
            emitted = sum(int(run.emitted[mask].sum()) for run, mask in zip(runs, outside, strict=True))
            assert row["tokens_per_step_outside_loops"] == emitted / sum(int(mask.sum()) for mask in outside)


def test_several_heads_read_the_same_texts(folder, tiny_model):
    """The trace of each is that of these heads alone."""
    medusa = save_tiny_medusa(folder / "trained")
    argv = [*command(folder, tiny_model), "--heads", "lookup", str(medusa), "--out", str(folder / "of-{heads}.npz")]
    assert run_main(lambda: main(argv)) == 0
    first, second = load_trace(folder / "of-lookup.npz"), load_trace(folder / "of-trained.npz")
    alone = load_trace(folder / "t.npz")
    assert all(np.array_equal(a, b) for a, b in zip(first.trace, alone.trace, strict=True))
    assert second.header.head_kind == "medusa" and second.header.depth == 2
    assert second.ids == first.ids and np.array_equal(second.trace.entropy_nats, first.trace.entropy_nats)


def save_tiny_medusa(place):
    shape = MedusaConfig(TINY_CONFIG.hidden_size, TINY_CONFIG.vocab_size, num_heads=2)
    save_head(
        place,
        shape=shape,
        backbone=TINY_CONFIG,
        params=jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), expected_params(shape, TINY_CONFIG)),
        draft_ids=None,
        backbone_name="tiny",
        backbone_fingerprint="f",
        draft_vocab={},
        provenance={},
    )
    return place


def test_held_out_records_are_traced_as_they_are(folder, tiny_model):
    prompts = [[i, i + 1] for i in range(1, 41)]
    records = from_sequences([[*prompt, 5, 6, 5, 6, EOS] for prompt in prompts], [2] * 40)
    save_records(folder / "records.npz", records)
    argv = [*command(folder, tiny_model)[4:], "--data", str(folder / "records.npz"), "--out", str(folder / "d.npz")]
    assert run_main(lambda: main(argv)) == 0
    read = load_trace(folder / "d.npz")
    assert read.ids == [str(index) for index in np.flatnonzero(held_out_records(records))]
    assert set(read.sets) == {"held_out"} and set(read.finish_reasons) == {"eos"}
    assert set(read.trace.new_tokens.tolist()) == {5} and not read.trace.agrees.all(), "the model did not write them"


def test_a_bank_is_fitted_on_a_trace_of_these_heads_only(folder, tiny_model, capsys):
    common = [
        "--model",
        str(tiny_model),
        "--heads",
        "lookup",
        "--cache-dir",
        str(folder / "cache"),
        "--capacity",
        "128",
    ]
    argv = [*common, "--trace", str(folder / "t.npz"), "--rows", "3", "--pooled-rows", "--out", str(folder / "f.json")]
    assert run_main(lambda: calibrate.main(argv)) == 0
    bank = load_bank(folder / "f.json")
    assert bank.topologies[0].name == "ar" and all(t.num_rows == 3 for t in bank.topologies[1:])
    assert set(bank.calibrations[0].topology_by_bin) <= {t.name for t in bank.topologies}
    assert bank.made_by["traced_positions"] == len(load_trace(folder / "t.npz").trace.ranks)
    read = load_trace(folder / "t.npz")
    stored = dict(np.load(folder / "t.npz"))
    other = stored["header"].tobytes().replace(read.header.head_fingerprint.encode(), b"0" * 16)
    write_npz(folder / "o.npz", stored | {"header": np.frombuffer(other, np.uint8)}, compress=False)
    capsys.readouterr()
    argv[argv.index(str(folder / "t.npz"))] = str(folder / "o.npz")
    assert run_main(lambda: calibrate.main(argv)) == 2
    assert "whose weights are not those of lookup" in capsys.readouterr().err


def empty(folder):
    (folder / "empty.jsonl").write_text("")
    return f"e={folder / 'empty.jsonl'}"


def too_deep(folder):
    save_bank(Bank("deep", (chain(17),)), folder / "deep.json")
    return str(folder / "deep.json")


WRONG = {
    "nothing asked": (lambda f, c: ["--heads", "lookup", "--out", "x.npz"], "give prompts by --set"),
    "both asked": (lambda f, c: [*c, "--data", str(f)], "and not both"),
    "no out": (lambda f, c: [*c[:-2]], "no --out FILE.npz"),
    "no name": (lambda f, c: [*c, "--set", "x.jsonl"], "write it as NAME=FILE.jsonl"),
    "name twice": (lambda f, c: [*c, "--set", "a=x.jsonl"], "two sets of this name"),
    "no such file": (lambda f, c: [*c, "--set", "c=none.jsonl"], "none.jsonl"),
    "empty file": (lambda f, c: [*c, "--set", empty(f)], "holds no prompts"),
    "all skipped": (lambda f, c: [*c, "--skip", "3"], "so none is left"),
    "no heads": (lambda f, c: [*c[: c.index("--heads")], *c[c.index("--heads") + 2 :]], "no --heads to trace"),
    "unknown heads": (lambda f, c: [*c, "--heads", "nonsense"], "nonsense"),
    "one file for two": (lambda f, c: [*c, "--heads", "lookup", "medusa"], "write {heads} into the name"),
    "no tokens": (lambda f, c: [*c, "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
    "negative skip": (lambda f, c: [*c, "--skip", "-1"], "--skip must be 0 or more"),
    "many ranks": (lambda f, c: [*c, "--top-k", "256"], "--top-k must be at most 255"),
    "no bank": (lambda f, c: ["--replay", str(f / "t.npz")], "--replay needs --bank"),
    "no trace": (lambda f, c: ["--replay", str(f / "none.npz"), "--bank", str(f / "bank.json")], "none.npz"),
    "bank too deep": (lambda f, c: ["--replay", str(f / "t.npz"), "--bank", too_deep(f)], "depth 17"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_user_may_do_wrong_ends_in_one_line(folder, tiny_model, capsys, case):
    arguments, message = WRONG[case]
    argv = arguments(folder, [*command(folder, tiny_model), "--out", str(folder / "wrong.npz")])
    code = run_main(lambda: main(argv))
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and message in errors[0] and not out
    assert not (folder / "wrong.npz").exists()
