"""Where a trained file comes from: command, code, versions, date."""

import datetime
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("entmtp_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def collect_provenance(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Facts about this run that JSON can hold.

    Args:
      script: as it is called, such as ``scripts/train.py``.
      arguments: of the command line.

    Returns:
      ``command``, ``git_commit`` (None outside a checkout; ``+changes`` if files differ from it), ``date`` in
      UTC, ``machine`` and ``versions``.
    """
    return {
        "command": shlex.join(["python", script, *arguments]),
        "git_commit": git_commit(Path(__file__).parent),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def git_commit(folder: Path) -> str | None:
    """The commit that a folder's checkout is at, or None without git or checkout."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
