"""Files of prompts: one JSON object a line, plain or gzipped."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from entmtp_jax.errors import UserError


class Prompt(NamedTuple):
    """One line of a prompt file.

    Attributes:
      id: unique in its file.
      prompt: the user's text.
      task: what kind of text it asks for, such as ``code``; empty if the file does not say.
    """

    id: str
    prompt: str
    task: str = ""


def read_prompts(path: Path) -> list[Prompt]:
    """Reads a JSONL file; each line has at least ``id`` (text or a number) and ``prompt``.

    Args:
      path: gzipped if its name ends in ``.gz``.

    Raises:
      UserError: names file and line of what is unreadable, empty, no JSON object, incomplete or repeated.
    """
    lines = _read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")  # a byte order mark, as Windows writes it
    if not lines[-1].strip():
        lines.pop()
    if not lines:
        raise UserError(f"{path}: holds no prompts; each line is an object with id and prompt")
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        prompt = _parse(line, f"{path}, line {number}")
        if prompt.id in line_of:
            raise UserError(f"{path}, line {number}: id {prompt.id!r} is that of line {line_of[prompt.id]} too")
        line_of[prompt.id] = number
        prompts.append(prompt)
    return prompts


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(f"{path}: not a whole gzip file; fetch it again, or drop .gz if it is plain text") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from None


def _parse(line: bytes, where: str) -> Prompt:
    if not line.strip():
        raise UserError(f"{where}: empty line; remove it")
    try:
        data = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text (byte {error.start} of the line); convert the file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); is the line cut off?") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected an object with id and prompt, got a {type(data).__name__}")
    for name in ("id", "prompt"):
        if name not in data:
            raise UserError(f"{where}: key {name!r} is missing; each line needs id and prompt")
    return Prompt(id=_id(data["id"], where), prompt=_text(data, "prompt", where), task=_text(data, "task", where))


def _id(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise UserError(f"{where}: id must be a non-empty text or an integer, got {value!r:.60}")
    return str(value)


def _text(data: dict[str, Any], name: str, where: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} must be text, got {value!r:.60}")
    return value
