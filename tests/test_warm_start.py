"""Training goes on from finished heads: of every kind, with other ids to score, and never from unfit ones."""

import json

import ml_dtypes  # noqa: F401  what lets safetensors return bfloat16 arrays
import numpy as np
import pytest
from safetensors.numpy import load_file

from entmtp_jax.cli import run_main
from entmtp_jax.commands import train as script
from entmtp_jax.training.data import from_sequences
from entmtp_jax.training.examples import take_draft_vocab
from tests.training_runs import command

pytestmark = pytest.mark.usefixtures("keep_compile_cache")

STILL = ("--steps", "1", "--lr", "1e-9")  # an update too small to change anything that is measured
KINDS = {
    "medusa": (),
    "medusa, own rows": ("--own-output",),
    "hydra++": ("--heads", "hydra++", "--batch", "4", "--row-length", "48"),
    "mtp": ("--heads", "mtp", "--batch", "4", "--row-length", "48"),
}


@pytest.fixture(scope="module")
def keep_compile_cache():
    """The script would move the whole process to its own cache of compiled programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entmtp_jax.commands.train_run.enable_compile_cache", lambda cache: None)
        yield


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory, tiny_model, keep_compile_cache):
    """Flags of a kind, the folder of a run of it, and what was measured at its end."""
    flags, folder = KINDS[request.param], tmp_path_factory.mktemp("run")
    assert script.main(command(tiny_model, folder, *flags, "--steps", "40")) == 0
    return flags, folder / "run" / "head", measured(folder)


def measured(folder):
    provenance = json.loads((folder / "run" / "head" / "provenance.json").read_text())
    return provenance["result"]["held_out"]


def refused(capsys, arguments):
    assert run_main(lambda: script.main(arguments)) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_run_begins_where_the_other_ended(tmp_path, tiny_model, trained):
    flags, head, expected = trained
    assert script.main(command(tiny_model, tmp_path, *flags, *STILL, "--start", str(head))) == 0
    assert measured(tmp_path) == expected
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert script.main(command(tiny_model, fresh, *flags, *STILL)) == 0
    assert measured(fresh)["greedy_chain"] < expected["greedy_chain"] - 0.2


def test_a_run_is_bound_to_its_start(tmp_path, tiny_model, trained, capsys):
    flags, head, _ = trained
    arguments = command(tiny_model, tmp_path, *flags, *STILL)
    assert script.main([*arguments, "--start", str(head)]) == 0
    assert "was begun with start {" in refused(capsys, arguments)
    other = json.loads((tmp_path / "run" / "run.json").read_text())
    other["start"] = {"weights_sha256": "0" * 64}
    (tmp_path / "run" / "run.json").write_text(json.dumps(other))
    assert "was begun with start" in refused(capsys, [*arguments, "--start", str(head)])


def test_unfit_heads_are_named(tmp_path, tiny_model, trained, capsys):
    flags, head, _ = trained
    other = ("--heads", "mtp", "--batch", "4", "--row-length", "48") if "mtp" not in flags else ()
    arguments = command(tiny_model, tmp_path, *other, "--start", str(head))
    assert "heads are to be trained" in refused(capsys, arguments)
    arguments = command(tiny_model, tmp_path, *flags, "--num-heads", "1", "--start", str(head))
    assert "but 1 is asked for" in refused(capsys, arguments)
    assert "no such folder of heads" in refused(capsys, command(tiny_model, tmp_path, *flags, "--start", "nowhere"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_scored_ids_of_other_heads_are_taken(tmp_path, tiny_model, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    assert script.main(command(tiny_model, first, "--draft-vocab", "8")) == 0
    assert script.main(command(tiny_model, second, "--draft-vocab", str(first / "run" / "head"))) == 0
    before, after = (load_file(folder / "run" / "head" / "heads.safetensors") for folder in (first, second))
    np.testing.assert_array_equal(before["draft_ids"], after["draft_ids"])
    assert measured(first) == measured(second)
    assert "nowhere: no such folder of heads" in refused(
        capsys, command(tiny_model, second, "--draft-vocab", "nowhere")
    )


def test_coverage_of_taken_ids():
    records = from_sequences([[9, 1, 1, 2], [9, 3, 3, 3, 5], [9, 2, 4]], [1, 1, 1])
    vocab = take_draft_vocab(records, np.asarray([False, True, False]), np.asarray([3, 7]))
    assert vocab.ids.tolist() == [3, 7] and not vocab.is_whole
    assert vocab.sweep == [(2, 0.75)]


def test_rows_follow_their_ids(tmp_path, tiny_model, capsys):
    whole, few = tmp_path / "whole", tmp_path / "few"
    for folder in (whole, few, tmp_path / "again"):
        folder.mkdir()
    assert script.main(command(tiny_model, whole, "--own-output", "--draft-vocab", "0", "--steps", "20")) == 0
    start = ("--start", str(whole / "run" / "head"))
    assert script.main(command(tiny_model, few, "--own-output", "--draft-vocab", "8", *STILL, *start)) == 0
    before, after = (load_file(folder / "run" / "head" / "heads.safetensors") for folder in (whole, few))
    wanted = before["output"][:, after["draft_ids"]].astype(np.float32)
    np.testing.assert_array_equal(after["output"].astype(np.float32), wanted)
    start = ("--start", str(few / "run" / "head"))
    arguments = command(tiny_model, tmp_path / "again", "--own-output", "--draft-vocab", "0", *start)
    assert "have none for 53 of the 61 scored ids" in refused(capsys, arguments)
