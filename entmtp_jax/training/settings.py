"""Keeps a folder to one set of settings, so that what was begun is never continued as something else."""

from pathlib import Path
from typing import Any, NamedTuple

from entmtp_jax.errors import UserError
from entmtp_jax.json_files import read_json, write_json

RUN_FILE, LOG_FILE = "run.json", "log.jsonl"  # in the folder of a training run


class Subject(NamedTuple):
    """What a run trains.

    Attributes:
      kind: of the heads, as ``--heads`` names it.
      backbone: name of the model that they are for.
      fingerprint: of its weights.
    """

    kind: str
    backbone: str
    fingerprint: str

    def __str__(self) -> str:
        """In words."""
        return f"{self.kind} heads for {self.backbone} (fingerprint {self.fingerprint})"


def check_subject(file: Path, subject: Subject) -> None:
    """Refuses the folder of a run of other heads or of another backbone, whatever that one is called.

    Args:
      file: JSON file in the run's folder, which need not exist; one that does not tell is left to its shapes.
      subject: of the run that is to go on there.

    Raises:
      UserError: names both.
    """
    known = read_json(file) if file.exists() else None
    told = known.get("subject") if isinstance(known, dict) else None
    if not isinstance(told, dict):
        return
    before = Subject(*(str(told.get(name, "unknown")) for name in Subject._fields))
    if (before.kind, before.fingerprint) != (subject.kind, subject.fingerprint):
        raise UserError(f"{file.parent}: holds a run of {before}, not of {subject}; give another folder")


def check_settings(file: Path, settings: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
    """Writes the settings of a new run, or compares them with those that the folder's run began with.

    Args:
      file: JSON file in the run's folder.
      settings: plain values, lists and dicts.
      facts: written with the settings of a new run, but never compared.

    Raises:
      UserError: names the first setting that differs.
    """
    if not file.exists():
        write_json(file, {**(facts or {}), **settings})
        return
    known = read_json(file)
    for name, value in settings.items():
        if not isinstance(known, dict) or known.get(name) != value:
            before = known.get(name) if isinstance(known, dict) else known
            raise UserError(
                f"{file.parent}: was begun with {name} {before}, not {value}; go on with the same settings or give "
                "another folder"
            )
