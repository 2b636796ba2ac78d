"""Keeps a folder to one set of settings, so that what was begun is never continued as something else."""

from pathlib import Path
from typing import Any

from entmtp_jax.errors import UserError
from entmtp_jax.json_files import read_json, write_json


def check_settings(file: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of a new run, or compares them with those that the folder's run began with.

    Args:
      file: JSON file in the run's folder.
      settings: plain values, lists and dicts.

    Raises:
      UserError: names the first setting that differs.
    """
    if not file.exists():
        write_json(file, settings)
        return
    known = read_json(file)
    for name, value in settings.items():
        if not isinstance(known, dict) or known.get(name) != value:
            before = known.get(name) if isinstance(known, dict) else known
            raise UserError(
                f"{file.parent}: was begun with {name} {before}, not {value}; go on with the same settings or give "
                "another folder"
            )
