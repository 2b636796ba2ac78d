"""What goes wrong in training is one line that says what and where, and what was good before stays."""

import dataclasses
import errno
import json
import os
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from entmtp_jax.cli import run_main
from entmtp_jax.commands import train as script
from entmtp_jax.errors import UserError
from entmtp_jax.training import run_checkpoints
from entmtp_jax.training.data import check_usable, check_vocabulary, from_sequences, load_records, save_records, usable
from entmtp_jax.training.features import load_features
from entmtp_jax.training.json_lines import append_json_line, read_json_lines
from entmtp_jax.training.loop import batch_indices, check_finite
from entmtp_jax.training.run_checkpoints import open_checkpoints
from tests.training_runs import SUBJECT, Killed, command, cyclic_records, killer, log_lines, problem, recipe, run, store

OTHER_KIND = SUBJECT._replace(kind="mtp")
OTHER_BACKBONE = SUBJECT._replace(backbone="large", fingerprint="fedcba9876543210")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    records = cyclic_records()
    return records, store(tmp_path_factory.mktemp("features"), records)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, stored):
    folder = tmp_path_factory.mktemp("run")
    return folder, run(folder, stored, recipe())


@pytest.fixture
def keep_compile_cache(monkeypatch):
    """The script would move the whole process to its own cache of compiled programs."""
    monkeypatch.setattr("entmtp_jax.commands.train_run.enable_compile_cache", lambda cache: None)


def refused(capsys, arguments):
    """The one line of a call that the user can help."""
    assert run_main(lambda: script.main(arguments)) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if not line.startswith("hidden states of all records take")]
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def kept(folder):
    """Steps of the whole checkpoints; nothing unfinished lies beside them."""
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    assert all(name.isdecimal() for name in names)
    return sorted(map(int, names))


def file_sums(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--heads", "mtp", "--row-length", "8"], "a record has "),
        (["--heads", "hydra", "--own-output"], "only Medusa heads are trained with output matrices"),
        (["--teacher", "2"], "a share lies between 0 and 1"),
        (["--data", "nowhere.npz"], "nowhere.npz: no such file or folder"),
        (["--model", "nowhere"], "nowhere"),
        (["--draft-vocab", "62"], "a draft vocabulary of 62 ids, but the model has 61"),
        (["--batch", "4096"], "training positions for a batch of 4096"),
        (["--num-heads", "0"], "at least one head"),
    ],
)
@pytest.mark.usefixtures("keep_compile_cache")
def test_the_script_explains_bad_input_in_one_line(tmp_path, tiny_model, capsys, more, message):
    assert message in refused(capsys, command(tiny_model, tmp_path, *more))
    assert not (tmp_path / "run" / "head").exists()


def test_broken_records_are_refused(tmp_path):
    save_records(tmp_path / "good.npz", cyclic_records(3), ids=["a", "b", "c"])
    good = (tmp_path / "good.npz").read_bytes()
    for name, data, message in [
        ("cut", good[:-30], "damaged or no .npz archive"),
        ("text", b"hello", "damaged or no .npz archive"),
        ("empty", b"", "damaged or no .npz archive"),
    ]:
        (tmp_path / f"{name}.npz").write_bytes(data)
        with pytest.raises(UserError, match=message):
            load_records(tmp_path / f"{name}.npz")
    np.save(tmp_path / "array.npy", np.arange(3))
    with pytest.raises(UserError, match="a lone array"):
        load_records(tmp_path / "array.npy")
    np.savez(tmp_path / "short.npz", tokens=np.arange(3), offsets=np.asarray([0, 3]))
    with pytest.raises(UserError, match="lacks the array 'prompt_length'"):
        load_records(tmp_path / "short.npz")
    np.savez(tmp_path / "odd.npz", tokens=np.arange(3), offsets=np.asarray([0, 4]), prompt_length=np.asarray([1]))
    with pytest.raises(UserError, match="do not fit together"):
        load_records(tmp_path / "odd.npz")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="no .npz shard in this folder"):
        load_records(tmp_path / "none")
    np.savez(tmp_path / "less.npz", tokens=np.arange(3), offsets=np.asarray([0, 3]), prompt_length=np.asarray([-1]))
    with pytest.raises(UserError, match="do not fit together"):
        load_records(tmp_path / "less.npz")
    np.savez(tmp_path / "real.npz", tokens=np.ones(3), offsets=np.asarray([0, 3]), prompt_length=np.asarray([1]))
    with pytest.raises(UserError, match="real.npz: tokens must be a list of integers"):
        load_records(tmp_path / "real.npz")
    for token in (-7, 2**32 + 5):  # which 32 bits would read as 5
        np.savez(tmp_path / "id.npz", tokens=np.asarray([1, token]), offsets=[0, 2], prompt_length=[1])
        with pytest.raises(UserError, match=f"id.npz: {token} is no token id"):
            load_records(tmp_path / "id.npz")


def test_a_record_is_usable_where_a_response_has_a_second_token():
    for prompt in range(5):
        for length in range(prompt, prompt + 5):
            places = [t for t in range(max(prompt - 1, 0), length) if t + 2 < length]
            assert usable(from_sequences([[1] * length], [prompt])).tolist() == [bool(places)]


def test_data_without_a_token_to_draft_are_refused():
    texts, prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 3, 4]], [2, 2, 2]
    records, held = from_sequences(texts, prompts), np.asarray([False, True, False])
    with pytest.raises(UserError, match="none of the 1 training records held out has a token to draft"):
        check_usable(records, held)
    with pytest.raises(UserError, match="none of the 2 training records to learn from has a token to draft"):
        check_usable(records, np.asarray([False, False, True]))
    longer = from_sequences([*texts, [1, 2, 3, 4]], [*prompts, 2])
    sides = np.asarray([False, True, False, True])
    check_usable(longer, sides)
    with pytest.raises(UserError, match="none of the 1 training records held out has a token"):
        check_usable(longer, sides, np.asarray([0, 1, 2]))


@pytest.mark.usefixtures("keep_compile_cache")
@pytest.mark.parametrize("kind", ["medusa", "mtp"])
def test_the_script_refuses_data_without_a_token_to_draft(tmp_path, tiny_model, capsys, kind):
    arguments = command(tiny_model, tmp_path, "--heads", kind)
    save_records(tmp_path / "data.npz", from_sequences([[i, i + 1, 3] for i in range(50)], [2] * 50))
    line = refused(capsys, arguments)
    assert f"{tmp_path / 'data.npz'}: none of the 50 records has a token to draft" in line
    assert not (tmp_path / "run").exists()
    save_records(tmp_path / "data.npz", from_sequences([], []))
    assert "none of the 0 records has a token to draft" in refused(capsys, arguments)


@pytest.mark.parametrize(("place", "record"), [(0, 0), (3, 0), (4, 1), (7, 1)])
def test_a_token_beyond_the_vocabulary_is_named_wherever_it_stands(place, record):
    records = from_sequences([[1, 2, 3, 4], [1, 2, 3, 4]], [2, 2])
    check_vocabulary(records, 5, where="a.npz", model="tiny")
    records.tokens[place] = 5
    with pytest.raises(UserError, match=f"a.npz: record {record} holds token 5, but tiny has ids 0 to 4"):
        check_vocabulary(records, 5, where="a.npz", model="tiny")


@pytest.mark.usefixtures("keep_compile_cache")
def test_the_script_refuses_records_of_another_vocabulary(tmp_path, tiny_model, capsys):
    arguments = command(tiny_model, tmp_path)
    records = cyclic_records()
    records.tokens[0] = 61  # of a prompt, which no loss looks at
    save_records(tmp_path / "data.npz", records)
    assert "data.npz: record 0 holds token 61, but tiny has ids 0 to 60" in refused(capsys, arguments)
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_named(tmp_path, stored):
    with pytest.raises(Killed):
        run(tmp_path, stored, recipe(), report=killer(6))
    (tmp_path / "checkpoints" / "4" / "default" / "_METADATA").write_bytes(b"")
    with pytest.raises(UserError, match="checkpoints/4: cannot be read as this run's state"):
        run(tmp_path, stored, recipe())


def test_a_run_is_not_continued_with_other_settings(undisturbed, stored):
    folder, _ = undisturbed
    with pytest.raises(UserError, match=r"was begun with learning_rate 0\.01, not 0\.5"):
        run(folder, stored, dataclasses.replace(recipe(), learning_rate=0.5))


def test_a_run_is_not_continued_with_another_loss(undisturbed, stored):
    folder, _ = undisturbed
    with pytest.raises(UserError, match="was begun with loss "):
        run(folder, stored, recipe(), teacher=0.5)


@pytest.mark.parametrize("other", [OTHER_KIND, OTHER_BACKBONE])
def test_a_run_of_other_heads_is_named_with_both(undisturbed, stored, other):
    folder, _ = undisturbed
    before = file_sums(folder)
    with pytest.raises(UserError) as caught:
        run(folder, stored, recipe(), subject=other)
    assert f"holds a run of {SUBJECT}, not of {other}" in str(caught.value)
    assert file_sums(folder) == before


def test_the_same_weights_by_another_name_are_the_same_backbone(tmp_path, undisturbed, stored):
    folder, expected = undisturbed
    result = run(folder, stored, recipe(), subject=SUBJECT._replace(backbone="elsewhere/tiny.gguf"))
    assert result.held_out == expected.held_out


def test_a_run_that_does_not_tell_its_subject_goes_on(tmp_path, undisturbed, stored):
    with pytest.raises(Killed):
        run(tmp_path, stored, recipe(), report=killer(6))
    file = tmp_path / "run.json"
    data = json.loads(file.read_text())
    del data["subject"]
    file.write_text(json.dumps(data))
    assert run(tmp_path, stored, recipe()).held_out == undisturbed[1].held_out


def test_checkpoints_that_nothing_describes_are_refused(tmp_path, stored):
    with pytest.raises(Killed):
        run(tmp_path, stored, recipe(), report=killer(6))
    (tmp_path / "run.json").unlink()
    with pytest.raises(UserError, match="checkpoints: checkpoints without the run.json that says what they are of"):
        run(tmp_path, stored, recipe())
    assert not (tmp_path / "run.json").exists()


@pytest.mark.usefixtures("keep_compile_cache")
def test_the_script_names_both_runs_before_it_works(tmp_path, tiny_model, capsys, monkeypatch):
    arguments = command(tiny_model, tmp_path)
    assert script.main(arguments) == 0
    capsys.readouterr()
    before = file_sums(tmp_path)
    line = refused(capsys, [*arguments, "--heads", "mtp"])
    assert "holds a run of medusa heads for tiny (fingerprint " in line and ", not of mtp heads for tiny (" in line
    monkeypatch.setattr("entmtp_jax.commands.train_run.fingerprint", lambda source: "fedcba9876543210")
    line = refused(capsys, arguments)
    assert "holds a run of medusa heads for tiny (" in line
    assert ", not of medusa heads for tiny (fingerprint fedcba9876543210)" in line
    assert file_sums(tmp_path) == before


def fail_at(step, error):
    """A checkpoint of that update is cut off half-way, as on a full disk."""
    whole = run_checkpoints.ocp.CheckpointManager.save

    def save(self, number, *arguments, **options):
        if number != step:
            return whole(self, number, *arguments, **options)
        half = Path(self.directory) / f"{number}.orbax-checkpoint-tmp"
        half.mkdir()
        (half / "data").write_bytes(b"half")

        def write():
            raise error

        writer = threading.Thread(target=write)  # the storage layer's own threads report their errors too
        writer.start()
        writer.join()
        raise error

    return save


@pytest.mark.parametrize("error", [FULL, ValueError("RESOURCE_EXHAUSTED: x\n: No space left on device [code 28]")])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, stored, undisturbed, monkeypatch, capfd, error):
    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.CheckpointManager.save", fail_at(8, error))
        assert run_main(lambda: bool(run(tmp_path, stored, recipe()))) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "checkpoints/8: cannot write the checkpoint of update 8 (No space left on device)" in line
    assert "the last good one, of update 4, is kept: free some space and give the same command again" in line
    assert kept(tmp_path) == [4]
    result = run(tmp_path, stored, recipe())
    jax.tree.map(np.testing.assert_array_equal, result.params, undisturbed[1].params)
    assert log_lines(tmp_path) == log_lines(undisturbed[0])


def test_a_full_disk_before_the_first_checkpoint_says_so(tmp_path, stored, monkeypatch):
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", fail_at(4, FULL))
    with pytest.raises(UserError, match="there is none yet"):
        run(tmp_path, stored, recipe())


def test_a_full_disk_leaves_the_blocks_of_features_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("entmtp_jax.training.features.BATCHES_PER_BLOCK", 1)
    monkeypatch.setattr("entmtp_jax.training.features.BATCH_TOKENS", 1024)
    records = cyclic_records()
    store(tmp_path, records, max_blocks=1)
    before = file_sums(tmp_path)

    def half(file, **arrays):
        file.write(b"half")
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr("numpy.savez", half)
        with pytest.raises(UserError, match=r"cannot write .*block_00001.npz: No space left on device"):
            store(tmp_path, records)
    assert file_sums(tmp_path) == before
    store(tmp_path, records)
    assert len(load_features(tmp_path).record) == len(records.tokens)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_a_log_line_on_a_full_disk_is_explained():
    with pytest.raises(UserError, match="cannot write /dev/full: No space left on device; free some space"):
        append_json_line(Path("/dev/full"), {"step": 1})


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    assert read_json_lines(tmp_path / "log.jsonl") == []
    append_json_line(tmp_path / "log.jsonl", {"step": 1})
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('7\n{"step": 2')
    assert read_json_lines(tmp_path / "log.jsonl") == [{"step": 1}]
    (tmp_path / "log.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read .*log.jsonl as text"):
        read_json_lines(tmp_path / "log.jsonl")


def poisoned(stored, update):
    """The same features, but one position that this update sees, and none before it, has no hidden state."""
    examples, _ = problem(stored)
    settings = recipe()
    chosen = batch_indices(update - 1, count=len(examples.train), batch=settings.batch, seed=settings.seed)
    records, features = stored
    hidden = features.hidden.copy()
    hidden[examples.positions[examples.train[chosen[0]]]] = np.nan
    return records, features._replace(hidden=hidden)


def test_a_loss_that_is_not_finite_stops_the_run_at_its_update(tmp_path, stored, undisturbed):
    bad = poisoned(stored, 7)  # between two log lines, just before a checkpoint
    message = "update 7 made .* NaN or infinite, so training stops; the checkpoint of update 4 is kept"
    for _ in range(2):  # started again, it goes on from that checkpoint and meets the same
        with pytest.raises(UserError, match=message):
            run(tmp_path, bad, recipe())
        assert kept(tmp_path) == [4]
        assert [line["step"] for line in log_lines(tmp_path)] == [2, 4, 5, 6]
    result = run(tmp_path, stored, recipe())  # the checkpoint is as good as if nothing had happened
    jax.tree.map(np.testing.assert_array_equal, result.params, undisturbed[1].params)
    assert log_lines(tmp_path) == log_lines(undisturbed[0])


def test_without_a_checkpoint_nothing_is_kept(tmp_path, stored):
    with pytest.raises(UserError, match="update 1 made .*; no checkpoint was written before"):
        run(tmp_path, poisoned(stored, 1), recipe())
    assert kept(tmp_path) == [] and not (tmp_path / "log.jsonl").exists()


def test_parameters_that_are_not_finite_are_found_though_the_loss_was(tmp_path):
    fine = {"loss": np.float32(1), "loss_by_head": np.ones(2)}
    check_finite([(3, fine)], {"w": np.zeros(2, np.float32)}, tmp_path, last_good=None)
    with pytest.raises(UserError, match="update 3 made parameters NaN or infinite"):
        check_finite([(2, fine), (3, fine)], {"w": np.asarray([0, np.inf], np.float32)}, tmp_path, last_good=2)
    with pytest.raises(UserError, match="update 2 made loss_by_head NaN or infinite"):
        check_finite(
            [(2, fine | {"loss_by_head": np.asarray([1, np.nan])}), (3, fine)], {"w": 0.0}, tmp_path, last_good=1
        )


@pytest.mark.usefixtures("keep_compile_cache")
def test_the_script_stops_where_an_absurd_rate_breaks_the_heads(tmp_path, tiny_model, capsys):
    arguments = command(tiny_model, tmp_path, "--lr", "1e38", "--checkpoint-every", "1", "--log-every", "5")
    line = refused(capsys, arguments)
    assert "run: update 3 made " in line and "the checkpoint of update 2 is kept" in line and "lower --lr" in line
    assert kept(tmp_path / "run") == [1, 2] and not (tmp_path / "run" / "head").exists()
    with open_checkpoints(tmp_path / "run") as checkpoints:
        state = checkpoints.restore(2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
