"""Files of one JSON object per line, which grow while something runs."""

import json
from pathlib import Path
from typing import Any

from entmtp_jax.errors import UserError


def append_json_line(file: Path, line: dict[str, Any]) -> None:
    """Adds one line.

    Raises:
      UserError: the file cannot be written, for instance because the disk is full.
    """
    try:
        with open(file, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; free some space or choose a writable path") from None


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file; a line that was cut off by a kill is left out, a missing file has none.

    Raises:
      UserError: the file cannot be read as text.
    """
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file} as text ({error}); remove it or restore it") from None
    return [data for line in lines if isinstance(data := _parsed(line), dict)]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
