"""A few rows times a large weight matrix on the CPU, by a C++ kernel that XLA calls through its foreign functions.

XLA's CPU matrix product is fine for one row but takes several times as long for the 2 to 32 rows of a draft tree. The
kernel (``skinny_matmul.cc``, beside this file) reads every weight once, whatever the number of rows. It is compiled on
first use by the system's C++ compiler and kept in the cache folder. Where that is impossible ``build`` returns False,
``reason`` says why, and the caller stays with ``jax.lax.dot_general``. The kernel has no gradient.
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
import jax.numpy as jnp
import jaxlib.version

from entmtp_jax.types import Array, Float

TARGET = "entmtp_skinny_matmul"
SOURCE = Path(__file__).with_name("skinny_matmul.cc")
# Contraction to fused multiply-add is spelled out: it is part of the order of rounding that all row counts share.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernel cannot be had here; the message is what ``reason`` returns."""


class _Status:
    """What this process knows about the kernel: usable if and only if ``reason`` is empty."""

    lock = threading.Lock()
    reason = "build() has not been called"


def build(cache: Path) -> bool:
    """Makes the kernel usable in this process: compiles it unless the cache has it, loads and registers it.

    Repeated calls cost nothing once one succeeded. Several processes may build at once: each
    compiles to a temporary name, and renaming is atomic.

    Args:
      cache: folder for the shared library; made if missing.

    Returns:
      Whether ``linear`` can be used; if not, ``reason()`` says why.
    """
    with _Status.lock:
        if _Status.reason:
            try:
                _register(_compiled_library(cache))
                _Status.reason = ""
            except (BuildError, OSError, subprocess.SubprocessError, jax.errors.JaxRuntimeError) as error:
                _Status.reason = " ".join(str(error).split())
        return not _Status.reason


def reason() -> str:
    """Why the kernel cannot be used, in one line; empty if it can."""
    return _Status.reason


def linear(x: Float[Array, "T K"], w: Float[Array, "O K"]) -> Float[Array, "T O"]:
    """The product of rows and transposed weights, ``y[t, o] = sum_k x[t, k] w[o, k]``, in float32.

    A row's result has the same bits alone and among other rows, and for bfloat16 weights the same
    bits as for their float32 copies: the order of summation depends on K alone.

    Args:
      x: rows, float32.
      w: weights, float32 or bfloat16 (widened exactly; all arithmetic is float32).

    Returns:
      Array of shape ``[T, O]``, float32.

    Raises:
      RuntimeError: ``build`` has not succeeded in this process.
      TypeError: a dtype other than those above.
    """
    if _Status.reason:
        raise RuntimeError(f"the skinny matmul kernel cannot be used: {_Status.reason}")
    if x.dtype != jnp.float32 or w.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x must be float32 and w float32 or bfloat16, not {x.dtype} and {w.dtype}")
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(TARGET, result)(x, w)


def _compiled_library(cache: Path) -> Path:
    """Path of the shared library for this source, compiler, processor and jaxlib; compiles it if it is not there."""
    command = _compiler_command()
    key = hashlib.sha256("\0".join([*command, jaxlib.version.__version__, _predefined_macros(command)]).encode())
    key.update(SOURCE.read_bytes())
    library = cache / f"skinny_matmul-{key.hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fresh = Path(folder) / library.name
            _run([*command, "-isystem", jax.ffi.include_dir(), str(SOURCE), "-o", str(fresh)])
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


def _register(library: Path) -> None:
    """Loads the shared library and tells XLA's CPU backend about its function."""
    function = ctypes.CDLL(str(library)).EntmtpSkinnyMatmul
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(function), platform="cpu")
