"""The decode command in-process on the tiny model: output, JSON, parity, and what a user may do wrong."""

import io
import json
import sys

import pytest

from entmtp_jax.cli import run_main
from entmtp_jax.commands.decode import main
from entmtp_jax.testing.reference import reference_decode
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone
from tests.model_folder import EOS

COMMON = ["--heads", "lookup", "--max-new-tokens", "24", "--capacity", "96"]
WORDS = "w3 w1 w4 w1 w5"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def decode(tiny_model, cache, capsys):
    """Runs the command; returns exit code, standard output and standard error."""

    def run(*arguments):
        argv = [*COMMON, "--model", str(tiny_model), "--cache-dir", cache, *arguments]
        code = run_main(lambda: main(argv))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def plain_text(words, count=24):
    _, params = tiny_backbone()
    prompt = [int(word[1:]) for word in words.split()]
    done = reference_decode(TINY_CONFIG, params, prompt, max_new_tokens=count, eos_ids=(EOS,))
    return done


def as_words(tokens):
    return " ".join(f"w{token}" for token in tokens if token != EOS)


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_it_writes_plain_decodings_text(decode, stream):
    code, out, _ = decode(WORDS, stream)
    assert code == 0 and out.strip() == as_words(plain_text(WORDS).tokens)


def test_json_stats_and_parity(decode, tmp_path):
    file = tmp_path / "out.json"
    code, _, err = decode(WORDS, "w7 w7 w7 w7", "--json", str(file), "--stats", "--check-parity")
    document = json.loads(file.read_text())
    assert code == 0 and [row["id"] for row in document["results"]] == ["prompt-0", "prompt-1"]
    for row, words in zip(document["results"], (WORDS, "w7 w7 w7 w7"), strict=True):
        expected = plain_text(words)
        assert row["tokens"] == expected.tokens and row["finish_reason"] == expected.finish_reason
        assert row["prompt"] == words and row["text"] == as_words(expected.tokens)
        stats = row["stats"]
        assert stats["new_tokens"] == len(expected.tokens)
        assert sum(stats["topology_steps"].values()) == stats["steps"] == sum(stats["accepted_histogram"])
        assert row["parity"] == {"equal": True, "first_difference": None, "margin": None}
    assert set(document["results"][0]["stats"]["topology_steps"]) <= set(document["config"]["topologies"])
    assert document["compile_s"] > 0 and document["config"]["policy"] == "entropy" and "jax" in document["versions"]
    assert "tokens per step, break-even" in err and err.count("equal to plain decoding") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "no temporary file stays"


def test_a_prompt_file_in_batches_keeps_its_order(decode, tmp_path):
    prompts = {"a": WORDS, "b": "w9", "c": "w2 w3 w2 w3 w2"}
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in prompts.items()))
    code, out, _ = decode("--prompts", str(file), "--batch-size", "2", "--json", str(tmp_path / "o.json"))
    rows = json.loads((tmp_path / "o.json").read_text())["results"]
    assert code == 0 and [row["id"] for row in rows] == list(prompts)
    assert [row["tokens"] for row in rows] == [plain_text(words).tokens for words in prompts.values()]
    assert out.index("### a") < out.index("### b") < out.index("### c")


@pytest.mark.parametrize("policy", ["ar", "fixed:chain3", "fixed:chain7", "entropy"])
def test_every_policy_writes_the_same_text(decode, policy):
    code, out, _ = decode(WORDS, "--policy", policy)
    assert code == 0 and out.strip() == as_words(plain_text(WORDS).tokens)


def test_standard_input_is_a_prompt(decode, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WORDS.encode() + b"\n")))
    code, out, _ = decode("-")
    assert code == 0 and out.strip() == as_words(plain_text(WORDS).tokens)


def test_ctrl_c_in_a_stream_ends_with_130_and_one_line(decode, monkeypatch, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("entmtp_jax.commands.decode_run.stream", interrupted)
    code, _, err = decode(WORDS, "--json", str(tmp_path / "o.json"))
    assert code == 130 and err.strip().endswith("interrupted") and not list(tmp_path.iterdir())


def bad_file(tmp_path, content):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    return str(file)


WRONG = {
    "no prompt": (lambda t: [], "no prompt"),
    "unknown heads": (lambda t: [WORDS, "--heads", "nonsense"], "nonsense"),
    "unknown policy": (lambda t: [WORDS, "--policy", "magic"], "magic"),
    "unknown topology": (lambda t: [WORDS, "--policy", "fixed:oak"], "oak"),
    "unknown bank": (lambda t: [WORDS, "--bank", "no_such_bank"], "no_such_bank"),
    "long prompt": (lambda t: ["w1 " * 200], "200 tokens"),
    "negative limit": (lambda t: [WORDS, "--max-new-tokens", "-1"], "--max-new-tokens"),
    "batch of none": (lambda t: [WORDS, "--batch-size", "0"], "--batch-size"),
    "no such folder": (lambda t: [WORDS, "--json", str(t / "none" / "o.json")], "folder does not exist"),
    "no such file": (lambda t: ["--prompts", str(t / "none.jsonl")], "none.jsonl"),
    "broken line": (lambda t: ["--prompts", bad_file(t, b'{"id": 1, "prompt": "w1"}\n{"id": 2')], "line 2"),
    "empty line": (
        lambda t: ["--prompts", bad_file(t, b'{"id": 1, "prompt": "w1"}\n\n{"id":2,"prompt":"w"}')],
        "line 2",
    ),
    "not UTF-8": (lambda t: ["--prompts", bad_file(t, b'{"id": 1, "prompt": "\xff"}\n')], "UTF-8"),
    "bank too deep": (lambda t: [WORDS, "--bank", bad_bank(t)], "17"),
    "broken bank": (lambda t: [WORDS, "--bank", bad_file(t, b"{")], "bad.jsonl"),
}


def bad_bank(tmp_path):
    from entmtp_jax.bank import bank_of, save_bank
    from entmtp_jax.topology import chain

    save_bank(bank_of(chain(17)), tmp_path / "deep.json")
    return str(tmp_path / "deep.json")


@pytest.mark.parametrize("case", WRONG)
def test_what_a_user_may_do_wrong_ends_in_one_line(decode, tmp_path, case):
    arguments, message = WRONG[case]
    code, out, err = decode(*arguments(tmp_path))
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and message in errors[0] and not out


def test_an_unknown_model_and_a_read_only_cache_are_named(capsys, tmp_path):
    assert run_main(lambda: main([WORDS, "--model", "no-such-model", "--cache-dir", str(tmp_path)])) == 2
    assert "no-such-model" in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run_main(lambda: main([WORDS, "--cache-dir", str(blocked)])) == 2
    assert str(blocked) in capsys.readouterr().err


def test_standard_input_that_is_not_utf_8(decode, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    code, _, err = decode("-")
    assert code == 2 and "UTF-8" in err
