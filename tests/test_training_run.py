"""Training on the tiny model: from records to stored features to heads, killed and resumed, and by the script."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entmtp_jax.backbone.precision import linear_highest
from entmtp_jax.backbone.transformer import output_matrix
from entmtp_jax.calibration.trace import KnownText, trace_texts
from entmtp_jax.checkpoints.head_files import load_head
from entmtp_jax.commands import train as script
from entmtp_jax.errors import UserError
from entmtp_jax.heads.interface import Shared
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.testing.reference import reference_logits
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone
from entmtp_jax.training.data import from_sequences, load_records
from entmtp_jax.training.draft_vocab import MISS, NO_COLUMN
from entmtp_jax.training.examples import choose_draft_vocab, held_out_records
from entmtp_jax.training.features import (
    NO_TARGET,
    backbone_pace,
    draft_targets,
    load_features,
    record_starts,
    response_positions,
)
from entmtp_jax.training.head_run import Constants, sampled_columns
from entmtp_jax.training.loop import LoopConfig, trim_log
from entmtp_jax.training.medusa import build_target_ranks, rank_examples
from entmtp_jax.training.throughput import measure_throughput
from tests.training_runs import (
    HEADS,
    Killed,
    command,
    cyclic_records,
    killer,
    log_lines,
    problem,
    recipe,
    run,
    store,
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    records = cyclic_records()
    return records, store(tmp_path_factory.mktemp("features"), records)


def test_features_hold_whole_records_in_order(stored):
    records, features = stored
    assert len(features.record) == len(records.tokens)
    for index in range(records.num_records):
        assert features.position[features.record == index].tolist() == list(range(records.lengths[index]))


def test_examples_are_the_response_positions(stored):
    records, features = stored
    chosen = response_positions(features, records)
    targets = draft_targets(features, records, chosen, HEADS)
    seen = 0
    for index in range(records.num_records):
        text, prompt = records.record(index), int(records.prompt_length[index])
        # From the position whose own next token begins the response to the last that still has a target.
        expected = [
            [text[t + 2 + k] if t + 2 + k < len(text) else NO_TARGET for k in range(HEADS)]
            for t in range(prompt - 1, len(text) - 2)
        ]
        assert targets[features.record[chosen] == index].tolist() == expected
        seen += len(expected)
    assert seen == len(chosen)


def test_hidden_states_are_those_of_the_backbone(stored):
    records, features = stored
    _, params = tiny_backbone()
    output = np.asarray(output_matrix(params), np.float32)
    for index in (0, 5):
        expected = reference_logits(TINY_CONFIG, params, records.record(index))
        got = features.hidden[features.record == index].astype(np.float32) @ output.T
        np.testing.assert_allclose(got, expected, atol=0.02 * np.abs(expected).max())  # stored as bfloat16


def test_feature_blocks_are_kept_and_belong_to_one_set(tmp_path, stored, monkeypatch):
    records, whole = stored
    monkeypatch.setattr("entmtp_jax.training.features.BATCHES_PER_BLOCK", 1)
    monkeypatch.setattr("entmtp_jax.training.features.BATCH_TOKENS", 1024)
    part = store(tmp_path, records, max_blocks=2)
    files = sorted(tmp_path.glob("block_*.npz"))
    before = [file.read_bytes() for file in files]
    assert len(files) == 2 and len(part.record) < len(whole.record)
    again = store(tmp_path, records)
    assert [file.read_bytes() for file in files] == before
    assert sorted(again.record.tolist()) == sorted(whole.record.tolist())
    assert len(load_features(tmp_path, 2).record) == len(part.record)
    with pytest.raises(UserError, match="was begun with fingerprint tiny, not other"):
        store(tmp_path, records, fingerprint="other")
    files[1].write_bytes(before[1][:-50])
    with pytest.raises(UserError, match="block_00001.npz: damaged or no .npz archive"):
        load_features(tmp_path)


def test_no_features_are_explained(tmp_path):
    with pytest.raises(UserError, match="no feature blocks here"):
        load_features(tmp_path)


def test_answers_to_one_prompt_stay_together():
    texts = [[prompt, prompt + 1, answer] for prompt in range(40) for answer in range(3)]
    held = held_out_records(from_sequences(texts, [2] * len(texts)), every=4)
    assert all(len(set(group)) == 1 for group in held.reshape(40, 3).tolist())
    assert 0.1 < held.mean() < 0.5
    with pytest.raises(UserError, match="too few to hold out"):
        held_out_records(from_sequences([[1, 2]], [1]))


def test_draft_vocabulary_counts_training_responses_only():
    records = from_sequences([[9, 1, 1, 2], [9, 3, 3, 3, 3], [9, 2, 4]], [1, 1, 1])
    held = np.asarray([False, True, False])
    options = {"vocab_size": 10, "eos_ids": (8,), "coverage": None}
    assert choose_draft_vocab(records, held, size=4, **options).ids.tolist() == [8, 1, 2, 4]
    whole = choose_draft_vocab(records, held, size=0, **options)
    assert whole.is_whole and sorted(whole.ids.tolist()) == list(range(10))
    with pytest.raises(UserError, match="a draft vocabulary of 11 ids, but the model has 10"):
        choose_draft_vocab(records, held, size=11, **options)
    with pytest.raises(UserError, match="by its size or by its coverage"):
        choose_draft_vocab(records, held, size=None, **options)
    with pytest.raises(UserError, match="the records hold token 4, but the model has 4"):
        choose_draft_vocab(records, held, size=2, **(options | {"vocab_size": 4, "eos_ids": ()}))


def test_head_i_learns_the_token_at_t_plus_2_plus_i(tmp_path, stored):
    trained = run(tmp_path, stored, recipe(steps=200))
    assert min(trained.held_out.top1) > 0.9  # prompts that were never seen
    records, features = stored
    examples, rows = problem(stored)
    learnt = examples.train
    shape = MedusaConfig(32, 61, num_heads=HEADS, draft_vocab_size=10)
    constants = Constants(rows, jnp.zeros((1, 32)))
    ranks = rank_examples(build_target_ranks(shape), trained.params, examples, learnt, constants)
    assert (ranks[examples.columns[learnt] >= 0] == 0).all()
    # The same with the label shift written out: a head that learnt another offset would name another token.
    kernel, bias = (np.asarray(trained.params[name], np.float32) for name in ("kernel", "bias"))
    hidden = features.hidden.astype(np.float32)
    held = held_out_records(records, every=4)
    index = int(np.flatnonzero(~held)[0])
    text, prompt = records.record(index), int(records.prompt_length[index])
    states = hidden[features.record == index][prompt - 1 :]
    ids = choose_draft_vocab(records, held, vocab_size=61, eos_ids=(60,), size=10, coverage=None).ids
    for k in range(HEADS):
        z = states @ kernel[k, 0].T + bias[k, 0]
        guess = ids[np.argmax((states + z / (1 + np.exp(-z))) @ np.asarray(rows).T, axis=1)]
        for row, t in enumerate(range(prompt - 1, len(text) - 2 - k)):
            assert guess[row] == text[t + 2 + k]


def test_tokens_outside_the_draft_vocabulary_are_wrong(tmp_path, stored):
    examples, _ = problem(stored, size=7)  # EOS and six of the nine tokens of the cycle
    trained = run(tmp_path, stored, recipe(steps=60), size=7)
    columns = examples.columns[examples.held_out]
    misses = (columns == MISS).sum(axis=0) / (columns != NO_COLUMN).sum(axis=0)
    for top10, miss in zip(trained.held_out.top10, misses, strict=True):
        assert 0.2 < miss < 0.5
        assert top10 == pytest.approx(1 - miss)  # ten candidates of seven ids: right wherever it can be


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, stored):
    folder = tmp_path_factory.mktemp("run")
    return folder, run(folder, stored, recipe())


@pytest.mark.parametrize("kills", [(2,), (6, 8)])
def test_killed_and_resumed_ends_bit_for_bit_the_same(tmp_path, stored, undisturbed, kills):
    folder, expected = undisturbed
    for when in kills:
        with pytest.raises(Killed):
            run(tmp_path, stored, recipe(), report=killer(when))
        (tmp_path / "checkpoints" / "8.orbax-checkpoint-tmp").mkdir()  # a checkpoint cut off while it was written
        with open(tmp_path / "log.jsonl", "a") as file:
            file.write('{"step": 1')  # and a line
    result = run(tmp_path, stored, recipe())
    jax.tree.map(np.testing.assert_array_equal, result.params, expected.params)
    assert result.held_out == expected.held_out
    assert log_lines(tmp_path) == log_lines(folder)


def test_a_finished_run_is_not_trained_further(undisturbed, stored):
    folder, expected = undisturbed
    lines = []
    result = run(folder, stored, recipe(), report=lines.append)
    jax.tree.map(np.testing.assert_array_equal, result.params, expected.params)
    assert lines == []


def test_log_holds_updates_and_evaluations(undisturbed):
    lines = log_lines(undisturbed[0])
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in lines if "held_out" in line] == [5, 10]
    assert lines[0].keys() == {"step", "loss", "loss_by_head", "gradient_norm"}
    assert len(lines[0]["loss_by_head"]) == HEADS and lines[-1]["loss"] < lines[0]["loss"]


def test_only_the_last_checkpoints_are_kept(undisturbed):
    assert sorted(path.name for path in (undisturbed[0] / "checkpoints").iterdir()) == ["12", "8"]


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    file = tmp_path / "log.jsonl"
    trim_log(file, last_step=20)
    assert not file.exists()
    file.write_text('{"step": 10}\n{"step": 20}\n{"step": 30}\n{"st')
    trim_log(file, last_step=20)
    assert file.read_text() == '{"step": 10}\n{"step": 20}\n'


def test_every_line_about_the_loss_tells_its_time(undisturbed):
    lines = [json.loads(line) for line in (undisturbed[0] / "log.jsonl").read_text().splitlines()]
    assert all(line["seconds"] > 0 and line["steps_per_s"] > 0 for line in lines if "loss" in line)


def test_throughput_adds_up_what_the_log_tells():
    log = [{"step": 10, "loss": 2.0, "seconds": 20.0}, {"step": 15, "held_out": {}}]
    log.append({"step": 20, "loss": 1.0, "seconds": 20.0})
    found = measure_throughput(log, positions=1000, backbone_pace=200.0, per_update=100)
    assert (found.backbone_s, found.training_s, found.trained_positions) == (5.0, 40.0, 2000)
    assert found.backbone_share == pytest.approx(5 / 45)
    untimed = measure_throughput([{"step": 20, "loss": 1.0}], positions=1000, backbone_pace=None, per_update=100)
    assert (untimed.backbone_s, untimed.training_s, untimed.backbone_share) == (None, None, None)


def test_the_pace_of_the_backbone_is_kept_beside_the_features(tmp_path):
    assert backbone_pace(tmp_path) is None
    lines = '{"block": 0, "positions": 600, "seconds": 2.0}\n{"block": 1, "positions": 400, "seconds": 3.0}\n{"blo'
    (tmp_path / "seconds.jsonl").write_text(lines)
    assert backbone_pace(tmp_path) == 200.0
    records = cyclic_records(12)
    features = store(tmp_path / "stored", records)
    (line,) = (tmp_path / "stored" / "seconds.jsonl").read_text().splitlines()
    assert json.loads(line)["positions"] == len(features.record) and (backbone_pace(tmp_path / "stored") or 0) > 0


def test_sampled_columns_depend_on_the_update_only():
    settings = recipe(sampled_rare=50, seed=3)
    first, second = sampled_columns(settings, 2000, 0), sampled_columns(settings, 2000, 1)
    assert first is not None and second is not None
    np.testing.assert_array_equal(first, sampled_columns(settings, 2000, 0))
    assert set(first) != set(second)
    assert len(set(first)) == 50 and first.min() >= 1024 and first.max() < 2000
    assert sampled_columns(recipe(), 2000, 0) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "must be positive"),
        ({"learning_rate": 0.0}, "must be positive"),
        ({"accumulate": 0}, "must be positive"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(recipe(), **change)


def test_more_rare_ids_than_there_are_are_refused(tmp_path, stored):
    with pytest.raises(UserError, match="cannot sample 5 rare ids: the heads score 10 ids"):
        run(tmp_path, stored, recipe(sampled_rare=5))


@pytest.mark.parametrize("option", ["steps", "log_every", "checkpoint_every"])
def test_intervals_must_be_positive(option):
    with pytest.raises(UserError, match="steps and intervals must be positive"):
        dataclasses.replace(LoopConfig(steps=5), **{option: 0})


@pytest.fixture
def keep_compile_cache(monkeypatch):
    """The script would move the whole process to its own cache of compiled programs."""
    monkeypatch.setattr("entmtp_jax.commands.train_run.enable_compile_cache", lambda cache: None)


@pytest.mark.parametrize(
    ("more", "draft_size"),
    [(("--draft-vocab", "8"), 8), (("--draft-vocab", "0", "--own-output"), None), (("--draft-coverage", "1.0"), 10)],
)
@pytest.mark.usefixtures("keep_compile_cache")
def test_the_script_trains_heads_that_load(tmp_path, tiny_model, capsys, more, draft_size):
    arguments = command(tiny_model, tmp_path, *more)
    assert script.main(arguments) == 0
    first = capsys.readouterr().out
    result = json.loads(first.splitlines()[-1])
    assert len(result["held_out"]["top1"]) == 2 and result["steps"] == 6
    _, params = tiny_backbone()
    shared = Shared(embedding=params["embed"]["embedding"], output=jnp.asarray(output_matrix(params)))
    head, head_params = load_head(tmp_path / "run" / "head", TINY_CONFIG, shared, top_k=10, linear=linear_highest)
    assert head.max_depth == 2
    assert head_params.get("draft_ids", jnp.zeros(0)).shape[0] == (draft_size or 0)
    provenance = json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())
    assert provenance["result"] == result and "--steps 6" in provenance["command"]
    data, throughput = provenance["data"], provenance["throughput"]
    assert data["sources"] == {str(tmp_path / "data.npz"): 80}
    assert data["records"] + data["held_out_records"] == data["all_records"] == 80
    assert data["scored_share"] == 1.0 if draft_size != 8 else 0.6 < data["scored_share"] < 1
    assert throughput["trained_positions"] == 6 * 32 and 0 < throughput["backbone_share"] < 1
    weights = (tmp_path / "run" / "head" / "heads.safetensors").read_bytes()
    assert script.main(arguments) == 0  # the finished run says the same again
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert (tmp_path / "run" / "head" / "heads.safetensors").read_bytes() == weights


@pytest.mark.usefixtures("keep_compile_cache")
def test_heads_over_the_whole_vocabulary_keep_the_order_of_the_ids(tmp_path, tiny_model):
    """What the script measured in its own order is what the loaded heads propose."""
    arguments = command(tiny_model, tmp_path, "--draft-vocab", "0", "--own-output", "--steps", "40")
    assert script.main(arguments) == 0
    _, params = tiny_backbone()
    shared = Shared(embedding=params["embed"]["embedding"], output=jnp.asarray(output_matrix(params)))
    head, head_params = load_head(tmp_path / "run" / "head", TINY_CONFIG, shared, top_k=5, linear=linear_highest)
    records, features = load_records(tmp_path / "data.npz"), load_features(tmp_path / "run" / "features")
    chosen = response_positions(features, records)
    chosen = chosen[held_out_records(records)[features.record[chosen]]]
    hidden = jnp.asarray(features.hidden[chosen], jnp.float32)
    state = head.init_state(len(chosen), 1)._replace(normed=hidden)
    tokens = np.asarray(head.propose(head_params, shared, state, jnp.zeros(len(chosen), jnp.int32), 2).greedy.tokens)
    targets = draft_targets(features, records, chosen, 2)
    right = (tokens[:, :, 0] == targets).sum(axis=0) / (targets != NO_COLUMN).sum(axis=0)
    result = json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())["result"]
    assert result["held_out"]["top1"] == pytest.approx(right.tolist(), abs=0.02)
    assert min(right) > 0.3


@pytest.mark.parametrize("kind", ["hydra", "hydra++", "mtp"])
@pytest.mark.usefixtures("keep_compile_cache")
def test_sequential_heads_learn_and_draft_what_was_measured(tmp_path, tiny_model, kind):
    """The accuracy that training measured on packed rows is that of the loaded head, run token by token."""
    options = ["--heads", kind, "--batch", "4", "--row-length", "48", "--bases", "16", "--teacher", "0.3"]
    arguments = command(tiny_model, tmp_path, *options, "--num-heads", "3", "--steps", "60", "--eval-every", "30")
    assert script.main(arguments) == 0
    backbone, params = tiny_backbone()
    shared = Shared(embedding=params["embed"]["embedding"], output=jnp.asarray(output_matrix(params)))
    head, head_params = load_head(tmp_path / "run" / "head", TINY_CONFIG, shared, top_k=5, linear=linear_highest)
    records, features = load_records(tmp_path / "data.npz"), load_features(tmp_path / "run" / "features")
    held = held_out_records(records)
    texts = [
        KnownText(
            records.record(record),
            int(records.prompt_length[record]),
            features.hidden[start:][: records.lengths[record]],
        )
        for record, start in record_starts(features).items()
        if held[record]
    ]
    unembed = functools.partial(backbone.unembed, params)
    ranks = trace_texts(head, head_params, shared, unembed, texts, depth=3).ranks
    result = json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())["result"]["held_out"]
    assert result["greedy_chain"] == pytest.approx(np.cumprod(ranks == 0, axis=1).sum(axis=1).mean(), abs=0.05)
    assert result["top1"][0] == pytest.approx((ranks[:, 0] == 0).mean(), abs=0.02)
    assert min(result["top1"]) > 0.8, "the cycle can be learnt"
