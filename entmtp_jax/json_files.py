"""JSON files that people edit: read with every key and type checked, written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from entmtp_jax.errors import UserError
from entmtp_jax.whole_files import replacing


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # JSON's true is an integer to Python


def _is_number(value: Any) -> bool:
    # What no double holds is refused too: 1e999 reads as infinity, and integers have no limit.
    return (isinstance(value, float) or _is_integer(value)) and abs(value) <= 1e300


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of JSON value: the words for it in messages, and the test for it."""

    words: str
    holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a JSON object."""

    kind: Kind
    required: bool = True


TEXT = Kind("a non-empty string", lambda value: isinstance(value, str) and bool(value))
INTEGER = Kind("an integer", _is_integer)
COUNT = Kind("a non-negative integer", lambda value: _is_integer(value) and value >= 0)
NUMBER = Kind("a finite number", _is_number)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def list_of(item: Kind) -> Kind:
    """A list whose items are all of one kind."""
    return Kind(
        f"a list, each item {item.words}", lambda value: isinstance(value, list) and all(map(item.holds, value))
    )


def object_of(item: Kind) -> Kind:
    """An object whose values are all of one kind, whatever the keys."""
    words = f"an object, each value {item.words}"
    return Kind(words, lambda value: isinstance(value, dict) and all(map(item.holds, value.values())))


def check_object(data: Any, where: str, keys: Mapping[str, Key]) -> dict[str, Any]:
    """Checks a JSON object against the keys that it may have.

    Args:
      data: what was read.
      where: file and place in it, for the message.
      keys: every known key.

    Returns:
      ``data``, unchanged.

    Raises:
      UserError: no object, or a key that is unknown, missing or of the wrong kind; the message names it.
    """
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected an object, got {_brief(data)}")
    for name in data:
        if name not in keys:
            raise UserError(f"{where}: unknown key {name!r}; known: {', '.join(keys)}")
    for name, key in keys.items():
        if name not in data:
            if key.required:
                raise UserError(f"{where}: key {name!r} is missing; add {key.kind.words}")
        elif not key.kind.holds(data[name]):
            raise UserError(f"{where}: key {name!r} must be {key.kind.words}, got {_brief(data[name])}")
    return data


def read_json(path: Path) -> Any:
    """Reads a JSON file in UTF-8; NaN, infinities and repeated keys are refused.

    Raises:
      UserError: the file is missing, unreadable or not JSON.
    """
    try:
        text = path.read_bytes().decode("utf-8")
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated_keys)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); is it another kind of file?") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}; is the file truncated?") from None


def write_json(path: Path, data: Any) -> None:
    """Writes a JSON file, indented; an existing file is replaced only once the new one is complete.

    A list of plain values goes on one line, so that a tree of 63 nodes is 2 lines to review and not 128.

    Raises:
      UserError: the folder cannot be written.
    """
    indented = json.dumps(data, indent=2, allow_nan=False)
    # A raw newline cannot occur inside a JSON string, so the pattern never matches within one.
    text = re.sub(r"\[\n[^\[\]{}]*\n\s*\]", _on_one_line, indented)
    with replacing(path) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")


def _on_one_line(found: re.Match[str]) -> str:
    lines = [line.strip() for line in found[0].split("\n")]
    return lines[0] + " ".join(lines[1:-1]) + lines[-1]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        repeated = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"key {repeated!r} is repeated in one object")
    return data


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
