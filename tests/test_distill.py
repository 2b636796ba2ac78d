import json

import numpy as np
import pytest

from entmtp_jax.bank import Bank
from entmtp_jax.cli import run_main
from entmtp_jax.commands.distill import main
from entmtp_jax.decode import ModelParams
from entmtp_jax.errors import UserError
from entmtp_jax.heads.lookup import build_lookup
from entmtp_jax.scheduler import fixed, ladder
from entmtp_jax.testing.reference import reference_decode
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone
from entmtp_jax.topology import autoregressive, chain, k_ary
from entmtp_jax.training.data import load_records, read_ids
from entmtp_jax.training.distill import DistillConfig, Question, Writer, distill, plan_batches
from tests.model_folder import EOS

NEW = 6
CONFIG = DistillConfig(eos_ids=(EOS,), max_new_tokens=NEW, batch=2, chunk=4)
QUESTIONS = [
    Question("long", [3, 1, 4, 1, 5, 9, 2]),
    Question("one", [7]),
    Question("two", [2, 7]),
    Question("three", [1, 8, 2]),
    Question("other three", [8, 2, 8]),
]


class Killed(Exception):
    """Stands for a kill: nothing in the package catches it."""


PLAIN = Bank("plain", (autoregressive(),))
DRAFTED = Bank("drafted", (autoregressive(), k_ary((2, 1)), chain(3)))


def make_writer(bank=PLAIN, policy=None, params=None):
    backbone, own = tiny_backbone()
    policy = policy or fixed(0, num_topologies=len(bank.topologies))
    return Writer(backbone, build_lookup(), ModelParams(own if params is None else params, {}), bank, policy)


def run(folder, questions=QUESTIONS, *, writer=None, kill_after=None, settings=None):
    writer = writer or make_writer()
    seen = []

    def progress(done, total):
        seen.append((done, total))
        if kill_after is not None and len(seen) > kill_after:
            raise Killed

    try:
        distill(writer, questions, folder, CONFIG, settings=settings or {"model": "tiny"}, progress=progress)
    except Killed:
        pass
    return seen


def answers(folder):
    records = load_records(folder)
    ids = [name for shard in sorted(folder.glob("*.npz")) for name in read_ids(shard)]
    assert len(ids) == records.num_records
    return {name: (records.record(i).tolist(), int(records.prompt_length[i])) for i, name in enumerate(ids)}


def expected():
    _, params = tiny_backbone()
    texts = {}
    for name, tokens in QUESTIONS:
        reference = reference_decode(TINY_CONFIG, params, tokens, max_new_tokens=NEW, eos_ids=(EOS,))
        texts[name] = ([*tokens, *reference.tokens], len(tokens))
    return texts


def test_answers_are_the_plain_text_of_the_backbone(tmp_path):
    assert run(tmp_path) == [(0, 5), (2, 5), (4, 5), (5, 5)]
    assert answers(tmp_path) == expected()


POLICIES = {"tree": fixed(1, num_topologies=3), "switching": ladder([2, 1, 0], [2.0, 3.5], num_topologies=3, window=4)}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_drafts_do_not_change_the_answers(tmp_path, policy):
    run(tmp_path, writer=make_writer(DRAFTED, policy))
    assert answers(tmp_path) == expected()


def test_batches_go_by_length():
    names = [[question.id for question in batch] for batch in plan_batches(QUESTIONS, 2)]
    assert names == [["one", "two"], ["other three", "three"], ["long"]]


@pytest.mark.parametrize("kill_after", [0, 1, 2])
def test_a_killed_run_goes_on_and_ends_with_the_same_answers(tmp_path, kill_after):
    run(tmp_path, kill_after=kill_after)
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*.npz")}
    assert len(before) == kill_after
    (tmp_path / ".shard_00009.npz.1.unfinished").write_bytes(b"half of it")
    assert run(tmp_path)[0] == (2 * kill_after, 5)
    assert answers(tmp_path) == expected()
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())


def test_further_prompts_are_added(tmp_path):
    run(tmp_path, QUESTIONS[:2])
    assert run(tmp_path) == [(2, 5), (3, 5), (5, 5)]
    assert answers(tmp_path) == expected()
    assert run(tmp_path) == [(5, 5)]


def test_other_settings_are_refused(tmp_path):
    run(tmp_path, [])
    with pytest.raises(UserError, match="was begun with model tiny, not huge"):
        run(tmp_path, settings={"model": "huge"})


def test_broken_weights_are_noticed(tmp_path):
    _, params = tiny_backbone()
    params = params | {"final_norm": {"scale": np.full(TINY_CONFIG.hidden_size, np.nan, np.float32)}}
    with pytest.raises(UserError, match="prompt one: the model's logits are not finite"):
        distill(make_writer(params=params), QUESTIONS[:2], tmp_path, CONFIG, settings={}, progress=lambda *_: None)
    assert not list(tmp_path.glob("*.npz"))


@pytest.fixture
def keep_compile_cache(monkeypatch):
    """The command would move the whole process to its own cache of compiled programs."""
    monkeypatch.setattr("entmtp_jax.commands.distill_run.enable_compile_cache", lambda cache: None)


def write_prompts(path, questions):
    lines = [{"id": name, "prompt": " ".join(f"w{token}" for token in tokens)} for name, tokens in questions]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.usefixtures("keep_compile_cache")
@pytest.mark.parametrize("flags", [[], ["--heads", "lookup", "--policy", "fixed:chain3"]], ids=["plain", "drafted"])
def test_the_command_answers_a_file(tmp_path, tiny_model, capsys, flags):
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts, [*QUESTIONS, Question("too long", [1] * 9)])
    arguments = ["--model", str(tiny_model), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    arguments += ["--max-new-tokens", str(NEW), "--max-prompt-tokens", "8", "--batch-size", "2"]
    arguments += ["--cache-dir", str(tmp_path / "cache"), *flags]
    assert main(arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == {"answered_now": 5, "answered": 5, "too_long": 1}
    assert answers(tmp_path / "out") == expected()
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["answered_now"] == 0


@pytest.mark.usefixtures("keep_compile_cache")
def test_the_command_explains_bad_input_in_one_line(tmp_path, tiny_model, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a"}\n')
    arguments = ["--model", str(tiny_model), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    assert run_main(lambda: main([*arguments, "--cache-dir", str(tmp_path / "cache")])) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {prompts}, line 1: key 'prompt' is missing") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
