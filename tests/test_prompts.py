import gzip
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.errors import UserError
from entmtp_jax.prompts import Prompt, read_prompts

GOOD = b'{"id": "a", "prompt": "hi", "task": "chat", "source": "mine"}\n{"id": 7, "prompt": ""}\n'
WANTED = [Prompt("a", "hi", "chat"), Prompt("7", "", "")]


@pytest.mark.parametrize("data", [GOOD, GOOD.rstrip(), b"\xef\xbb\xbf" + GOOD, GOOD.replace(b"\n", b"\r\n")])
def test_reads_lines_however_they_end(tmp_path, data):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(data)
    assert read_prompts(file) == WANTED


def test_reads_gzip(tmp_path):
    file = tmp_path / "prompts.jsonl.gz"
    file.write_bytes(gzip.compress(GOOD))
    assert read_prompts(file) == WANTED


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(), min_size=1, max_size=5))
def test_any_text_survives(tmp_path_factory, texts):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"id": str(i), "prompt": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    assert [prompt.prompt for prompt in read_prompts(file)] == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "empty line; remove it"),
        (b"   ", "empty line; remove it"),
        (b'{"id": "b", "prompt": "cut o', "not valid JSON"),
        (b'["b", "text"]', "expected an object with id and prompt, got a list"),
        (b'{"prompt": "text"}', "key 'id' is missing"),
        (b'{"id": "b"}', "key 'prompt' is missing"),
        (b'{"id": "b", "prompt": 3}', "prompt must be text, got 3"),
        (b'{"id": true, "prompt": "text"}', "id must be a non-empty text or an integer, got True"),
        (b'{"id": "", "prompt": "text"}', "id must be a non-empty text or an integer"),
        (b'{"id": "b", "prompt": "text", "task": null}', "task must be text, got None"),
        (b'{"id": "b", "prompt": "\xff"}', "not UTF-8 text (byte 23 of the line)"),
        (b'{"id": "a", "prompt": "again"}', "id 'a' is that of line 1 too"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(GOOD.split(b"\n")[0] + b"\n" + line + b'\n{"id": "c", "prompt": "last"}\n')
    with pytest.raises(UserError, match=re.escape(f"{file}, line 2: {message}")):
        read_prompts(file)


def test_ids_are_compared_as_text(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 1, "prompt": "x"}\n{"id": "1", "prompt": "y"}\n')
    with pytest.raises(UserError, match="id '1' is that of line 1 too"):
        read_prompts(file)


@pytest.mark.parametrize("data", [b"", b"  ", b"\xef\xbb\xbf"])
def test_an_empty_file_holds_no_prompts(tmp_path, data):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(data)
    with pytest.raises(UserError, match="holds no prompts"):
        read_prompts(file)


@pytest.mark.parametrize("data", [b"plain text", gzip.compress(GOOD)[:-9], gzip.compress(GOOD)[:5]])
def test_a_broken_gzip_file_is_refused(tmp_path, data):
    file = tmp_path / "prompts.jsonl.gz"
    file.write_bytes(data)
    with pytest.raises(UserError, match="not a whole gzip file"):
        read_prompts(file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read .*nowhere.jsonl: No such file"):
        read_prompts(tmp_path / "nowhere.jsonl")
