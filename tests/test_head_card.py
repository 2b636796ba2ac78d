"""Cards and training-curve pictures, from the files of small runs, which are also made to look like older ones."""

import json
import re
import shutil
import struct
import sys

import numpy as np
import pytest

from entmtp_jax.checkpoints.head_files import read_head_info
from entmtp_jax.cli import run_main
from entmtp_jax.commands import head_card as script
from entmtp_jax.commands import train
from entmtp_jax.commands.head_card_run import tensor_sizes
from entmtp_jax.errors import UserError
from entmtp_jax.heads.hydra_layers import HydraConfig
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.heads.mtp_layers import MTPConfig
from entmtp_jax.report.head_card import TensorSize, accuracy_table, flat_settings, level_bytes
from entmtp_jax.report.training_curve import curve_of, draw_curve
from tests.training_runs import command

KINDS = {
    "medusa": ["--draft-vocab", "8", "--eval-every", "2"],
    "hydra++": ["--batch", "4", "--row-length", "48", "--bases", "4", "--num-layers", "2", "--teacher", "0.3"],
    "mtp": ["--batch", "4", "--row-length", "48", "--bases", "4", "--train-depth", "1"],
}
D, V, X = 32, 61, 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    """One finished run of every kind, to be read only."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entmtp_jax.commands.train_run.enable_compile_cache", lambda cache: None)
        for kind, options in KINDS.items():
            folder = tmp_path_factory.mktemp("card")
            assert train.main(command(tiny_model, folder, "--heads", kind, *options)) == 0
            found[kind] = folder / "run"
    return found


@pytest.fixture
def copied(runs, tmp_path):
    """The Medusa run, to be changed."""
    return shutil.copytree(runs["medusa"], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "features"))


def change(file, **values):
    """Sets keys of a JSON file; None removes one."""
    data = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def png_size(file):
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and len(data) < 60_000
    return struct.unpack(">2I", data[16:24])


def read_table(card, first):
    """Rows of the Markdown table whose head begins with this cell."""
    lines = card.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_the_card_tells_what_the_files_of_the_run_tell(runs, tmp_path, kind, capsys):
    out = tmp_path / "models" / "tiny" / "heads" / "mine"
    shutil.copytree(runs[kind] / "head", out)
    (tmp_path / "note.md").write_text("The tokens walk round a cycle.\n")
    assert script.main([str(runs[kind]), "--out", str(out), "--note", str(tmp_path / "note.md")]) == 0
    picture = tmp_path / "models" / "tiny" / "curves" / "mine.png"
    assert capsys.readouterr().out.splitlines() == [str(out / "card.md"), str(picture)]
    names = ["card.md", "config.json", "heads.safetensors", "provenance.json"]
    assert sorted(file.name for file in out.iterdir()) == names
    card = (out / "card.md").read_text()
    linked = re.findall(r"!\[.*\]\((.*)\)", card)
    assert [(out / link).resolve() for link in linked] == [picture.resolve()]
    assert png_size(picture)[0] > 400
    provenance = json.loads((out / "provenance.json").read_text())
    held_out, data = provenance["result"]["held_out"], provenance["data"]
    rows = read_table(card, "depth")
    assert len(rows) == len(held_out["top1"]) == 2
    for depth, row in enumerate(rows):
        shares = [held_out[name][depth] for name in ("top1", "top5", "top10")]
        assert row == [str(depth), f"t+{depth + 2}", *(f"{100 * share:.1f} %" for share in shares)]
    about = dict(read_table(card, ""))
    assert "6 updates" in about["Training"] and "peak rate 0.01" in about["Training"]
    assert f"80 of 80 of the backbone's own answers, {data['positions']:,} positions" in about["Data"]
    assert "data.npz` 100.0 %" in about["Data"] and about["Licence"] == "Apache-2.0"
    assert re.search(r"positions in .* per second; training .* per second; .* % of both", about["Throughput"])
    assert json.loads((out / "config.json").read_text())["backbone"]["fingerprint"] in about["Backbone"]
    settings = dict(read_table(card, "setting"))
    assert settings["`loop.steps`"] == "6" and settings["`learning_rate`"] == "0.01" and "`loss.weights`" in settings
    assert provenance["command"] in card and card.endswith("## Notes\n\nThe tokens walk round a cycle.\n")
    assert "not recorded" not in card


def test_the_card_names_the_heads_that_a_run_began_with(copied):
    change(copied / "run.json", start={"weights_sha256": "0123456789abcdef" * 4})
    assert script.main([str(copied)]) == 0
    card = (copied / "head" / "card.md").read_text()
    assert "begun from trained heads (weights 0123456789ab), 6 updates" in dict(read_table(card, ""))["Training"]
    assert dict(read_table(card, "setting"))["`start.weights_sha256`"] == "0123456789abcdef" * 4


def test_without_out_the_run_itself_is_described(copied):
    assert script.main([str(copied)]) == 0
    assert (copied / "head" / "card.md").is_file() and png_size(copied / "curve.png")
    assert "](../curve.png)" in (copied / "head" / "card.md").read_text()


def test_runs_of_earlier_versions_have_a_card_that_says_what_is_missing(copied):
    provenance = json.loads((copied / "head" / "provenance.json").read_text())
    names = ("records", "held_out_records", "examples", "mark")
    old = {name: provenance["data"][name] for name in names}
    change(copied / "head" / "provenance.json", data=old, throughput=None)
    change(copied / "head" / "config.json", draft_vocab={})
    change(copied / "run.json", subject=None, loss=None)
    lines = [json.loads(line) for line in (copied / "log.jsonl").read_text().splitlines()]
    (copied / "log.jsonl").write_text(
        "".join(json.dumps({name: line[name] for name in line if name != "seconds"}) + "\n" for line in lines)
    )
    assert script.main([str(copied)]) == 0
    card = (copied / "head" / "card.md").read_text()
    about = dict(read_table(card, ""))
    pace = [line["steps_per_s"] for line in lines if "loss" in line][-1]
    assert about["Throughput"] == (
        f"time of the backbone not recorded; time of the training not recorded, its pace {pace:.2f} updates per second"
    )
    assert f"{provenance['data']['positions']:,} positions" in about["Data"]
    assert "counts as wrong (share not recorded)" in card


def test_the_share_of_misses_is_bounded_by_the_next_smaller_size(copied):
    data = json.loads((copied / "head" / "provenance.json").read_text())["data"]
    del data["scored_share"]
    change(copied / "head" / "provenance.json", data=data)
    sizes = {"4": 0.75, "7": 0.9, "16": 0.99}  # the heads score 8 ids
    change(copied / "head" / "config.json", draft_vocab={"held_out_coverage_by_size": sizes})
    assert script.main([str(copied)]) == 0
    assert "counts as wrong (at most 10.0 % of them)" in (copied / "head" / "card.md").read_text()


def refused(capsys, *arguments):
    capsys.readouterr()
    assert run_main(lambda: script.main([str(word) for word in arguments])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_bad_input_is_one_line(runs, copied, tmp_path, capsys):
    assert "no finished training run, it lacks head/provenance.json" in refused(capsys, tmp_path)
    assert "holds other heads than" in refused(capsys, copied, "--out", runs["mtp"] / "head")
    assert "no such folder of heads" in refused(capsys, copied, "--out", tmp_path / "nowhere")
    assert "nowhere.md" in refused(capsys, copied, "--note", tmp_path / "nowhere.md")
    (copied / "log.jsonl").rename(tmp_path / "log.jsonl")
    assert "no line about the loss" in refused(capsys, copied)
    (tmp_path / "log.jsonl").rename(copied / "log.jsonl")
    change(copied / "run.json", batch=None)
    assert "run.json: lacks 'batch'" in refused(capsys, copied)
    change(copied / "head" / "provenance.json", result={"steps": 6})
    assert "provenance.json, result: lacks 'held_out'" in refused(capsys, copied)
    assert not (copied / "head" / "card.md").exists() and not (copied / "curve.png").exists()
    (copied / "head" / "heads.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="heads.safetensors: .*is the folder complete"):
        tensor_sizes(copied / "head" / "heads.safetensors")


def test_without_matplotlib_nothing_is_written(copied, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused(capsys, copied)
    assert line.startswith("error: matplotlib is not installed") and "entmtp_jax[plots]" in line
    assert not (copied / "head" / "card.md").exists()


def test_the_curve_holds_losses_interim_measures_and_the_end():
    log = [
        {"step": 2, "loss": 7, "loss_by_head": [3, 4]},
        {"step": 4, "loss": 5, "loss_by_head": [2, 3]},
        {"step": 5, "held_out": {"top1": [0.1, 0.0]}},
    ]
    curve = curve_of(log, [0.2, 0.1], 6)
    assert curve == ([2, 4], [[3, 4], [2, 3]], [5, 6], [[0.1, 0.0], [0.2, 0.1]])


def test_a_long_run_of_deep_heads_still_fits_a_small_file(tmp_path):
    """Less depth in training than in drafting, as --train-depth allows."""
    random = np.random.default_rng(0)
    levels = np.asarray([1.2, 2.2, 2.8, 3.1, 3.3])
    losses = [
        {"step": 10 * i, "loss_by_head": (levels + 6 * np.exp(-i / 20) + random.normal(0, 0.1, 5)).tolist()}
        for i in range(1, 200)
    ]
    measures = [{"step": 140 * i, "held_out": {"top1": random.uniform(0, 0.6, 7).tolist()}} for i in range(1, 14)]
    draw_curve(curve_of(losses + measures, [0.5] * 7, 2000), tmp_path / "curve.png", title="MTP heads")
    assert png_size(tmp_path / "curve.png")[0] > 400
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]


def sizes(*names):
    return {name: TensorSize(1, 1000) for name in names}


@pytest.mark.parametrize(
    ("shape", "tensors", "expected"),
    [
        (MedusaConfig(D, V, 2, draft_vocab_size=X), sizes("kernel", "draft_ids"), [500 + 2 * D * X] * 2),
        (MedusaConfig(D, V, 2, own_output=True), sizes("kernel", "bias", "output"), [1500] * 2),
        (
            HydraConfig(D, V, 2, 1, intermediate_size=40, draft_vocab_size=X),
            sizes("heads.head_0.a", "heads.head_1.a", "heads.head_1.b", "prefix.a", "draft_ids"),
            [1000 + 2 * D * X, 2000 + 2 * D * X],
        ),
        (MTPConfig(D, V, 40, max_depth=3), sizes("modules.0.a", "modules.0.b"), [2000 + 2 * D * V] * 3),
        (
            MTPConfig(D, V, 40, max_depth=4, num_modules=2),
            sizes("modules.0.a", "modules.1.a", "modules.1.b"),
            [1000 + 2 * D * V, *[2000 + 2 * D * V] * 3],
        ),
    ],
)
def test_a_level_reads_its_own_weights_and_the_output_rows(shape, tensors, expected):
    assert level_bytes(shape, tensors) == expected


def test_sizes_of_the_tensors_are_those_of_the_file(runs):
    found = tensor_sizes(runs["medusa"] / "head" / "heads.safetensors")
    assert read_head_info(runs["medusa"] / "head").shape.draft_vocab_size == X
    assert found["kernel"] == TensorSize(2 * 1 * D * D, 2 * 2 * D * D)
    assert found["bias"] == TensorSize(2 * D, 4 * 2 * D) and found["draft_ids"] == TensorSize(X, 4 * X)


def test_settings_are_listed_flat_without_what_stands_elsewhere():
    recipe = {"subject": {"kind": "mtp"}, "shape": {"depth": 3}, "loss": {"weights": [1.0, 0.8000001]}, "batch": 8}
    assert flat_settings(recipe) == [("loss.weights", "1, 0.8"), ("batch", "8")]


def test_accuracies_are_a_table_by_depth():
    table = accuracy_table({"top1": [0.5, 0.25], "top5": [0.75, 0.5], "top10": [1.0, 0.6251]})
    assert table.splitlines()[2:] == [
        "| 0 | t+2 | 50.0 % | 75.0 % | 100.0 % |",
        "| 1 | t+3 | 25.0 % | 50.0 % | 62.5 % |",
    ]
