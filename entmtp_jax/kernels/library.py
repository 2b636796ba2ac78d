"""A C++ kernel as a shared library: compiled on first use, loaded, and registered with XLA's CPU backend.

The system's C++ compiler builds it into the cache folder. Where that is impossible ``build`` returns False and
``reason`` says why, so that the caller can stay with XLA's own operations. Kernels have no gradient.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import jax
import jaxlib.version

from entmtp_jax.types import Array

# Products are fused with sums where the source says so (MultiplyAdd in vectors.h) and nowhere else: the choice is part
# of the order of rounding that all row counts share.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernel cannot be had here; the message is what ``reason`` is set to."""


class KernelLibrary:
    """One kernel in this process: usable if and only if ``reason`` is empty.

    Attributes:
      name: the C++ file is ``<name>.cc`` beside this module; headers beside it may be included.
      symbol: of the handler that the file defines.
      target: name under which XLA calls it.
      reason: why the kernel cannot be used, in one line; empty if it can.
      library: name of the shared library in use, which tells source, compiler and processor apart; empty before.
    """

    def __init__(self, name: str, *, symbol: str) -> None:
        self.name = name
        self.symbol = symbol
        self.target = f"entmtp_{name}"
        self.reason = "build() has not been called"
        self.library = ""
        self._lock = threading.Lock()

    def build(self, cache: Path) -> bool:
        """Makes the kernel usable in this process: compiles it unless the cache has it, loads and registers it.

        Repeated calls cost nothing once one succeeded. Several processes may build at once: each
        compiles to a temporary name, and renaming is atomic.

        Args:
          cache: folder for the shared library; made if missing.

        Returns:
          Whether the kernel can be used; if not, ``reason`` says why.
        """
        with self._lock:
            if self.reason:
                try:
                    source = Path(__file__).with_name(f"{self.name}.cc")
                    library = _compiled_library(source, cache)
                    _register(library, self.symbol, self.target)
                    self.reason, self.library = "", library.name
                except (BuildError, OSError, subprocess.SubprocessError, jax.errors.JaxRuntimeError) as error:
                    self.reason = " ".join(str(error).split())
            return not self.reason

    def call(self, result: jax.ShapeDtypeStruct, *arguments: Array) -> Array:
        """Runs the kernel, inside a compiled program or outside.

        Args:
          result: shape and dtype of what it returns.
          arguments: what it reads.

        Raises:
          RuntimeError: ``build`` has not succeeded in this process.
        """
        if self.reason:
            raise RuntimeError(f"the {self.name.replace('_', ' ')} kernel cannot be used: {self.reason}")
        return jax.ffi.ffi_call(self.target, result)(*arguments)


def _compiled_library(source: Path, cache: Path) -> Path:
    """Path of the shared library for this source, compiler, processor and jaxlib; compiles it if it is not there."""
    command = _compiler_command()
    key = hashlib.sha256("\0".join([*command, jaxlib.version.__version__, _predefined_macros(command)]).encode())
    for path in (source, *sorted(source.parent.glob("*.h"))):
        key.update(path.read_bytes())
    library = cache / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fresh = Path(folder) / library.name
            _run([*command, "-isystem", jax.ffi.include_dir(), str(source), "-o", str(fresh)])
            fresh.replace(library)
    return library


def _compiler_command() -> list[str]:
    """The C++ compiler (environment variable CXX first) with our flags."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for words in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(words[0]):
            return [*words, *FLAGS]
    tried = chosen[0] if chosen else ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler found (tried {tried}): install g++ or clang++, or set CXX")


def _predefined_macros(command: list[str]) -> str:
    """What the compiler says about itself and about the processor: its version and every instruction set in use."""
    return _run([*command, "-E", "-dM", "-x", "c++", os.devnull])


def _run(command: list[str]) -> str:
    """Standard output of a compiler run; its first error line becomes the message when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S)
    if done.returncode:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line), *lines[:1] or ["no message"])
        raise BuildError(f"{command[0]} failed with exit code {done.returncode}: {first}")
    return done.stdout


def _register(library: Path, symbol: str, target: str) -> None:
    """Loads the shared library and tells XLA's CPU backend about its function."""
    function = getattr(ctypes.CDLL(str(library)), symbol)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
