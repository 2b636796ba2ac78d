"""The C++ kernel for a few rows: numbers, bits, control flow, threads, processes, and machines without a compiler."""

import json
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.kernels import skinny_matmul

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory) -> Path:
    """A folder with the compiled kernel, which is also registered in this process."""
    cache = tmp_path_factory.mktemp("kernel")
    if not skinny_matmul.KERNEL.build(cache):
        pytest.skip(f"no kernel here: {skinny_matmul.KERNEL.reason}")
    return cache


@pytest.fixture
def linear(kernel_cache):
    return skinny_matmul.linear


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


def exact_product(x: jax.Array, w: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def python(code: str, cache: Path, **environment: str) -> str:
    """Runs code in a new process with the kernel's cache folder as ``cache``; returns what it prints."""
    header = "import pathlib, jax, jax.numpy as jnp, numpy as np\nfrom entmtp_jax.kernels import skinny_matmul\n"
    command = [sys.executable, "-c", f"{header}cache = pathlib.Path({str(cache)!r})\n{code}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Numbers


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    depth=st.integers(1, 130),
    num_out=st.integers(1, 60),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_agrees_with_float64(kernel_cache, rows, depth, num_out, dtype, seed):
    x, w = normal(seed, rows, depth), normal(seed + 1, num_out, depth, dtype=dtype)
    # Rounding is bounded by the sum of the terms' sizes, not by the sum itself, which may cancel.
    bound = exact_product(abs(x), abs(w)) * 1e-5
    assert np.all(np.abs(np.asarray(skinny_matmul.linear(x, w)) - exact_product(x, w)) <= bound)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_out, depth", [(3001, 577), (101, 40000), (1, 1536)])
def test_large_matrices_of_several_chunks_per_thread(linear, num_out, depth, dtype):
    x, w = normal(0, 5, depth), normal(1, num_out, depth, dtype=dtype)
    np.testing.assert_allclose(linear(x, w), exact_product(x, w), rtol=1e-5, atol=1e-5 * depth**0.5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_integers_are_exact(linear, dtype):
    rng = np.random.default_rng(0)
    x, w = rng.integers(-8, 9, (7, 345)), rng.integers(-8, 9, (50, 345))
    result = linear(jnp.asarray(x, jnp.float32), jnp.asarray(w, dtype))
    np.testing.assert_array_equal(result, x @ w.T)


@pytest.mark.parametrize("shape", [(0, 8, 30), (4, 8, 0), (4, 0, 30)], ids=["no rows", "no outputs", "no depth"])
def test_empty_axes(linear, shape):
    rows, depth, num_out = shape
    np.testing.assert_array_equal(linear(normal(0, rows, depth), normal(1, num_out, depth)), np.zeros((rows, num_out)))


# Bits


@pytest.mark.parametrize("depth", [576, 1537])
def test_row_has_the_same_bits_for_every_number_of_rows(linear, depth):
    x, w, run = np.asarray(normal(0, 70, depth)), normal(1, 50, depth), jax.jit(linear)
    alone = np.concatenate([bits(run(x[t : t + 1], w)) for t in range(70)])
    for rows in (*range(1, 17), 23, 32, 45, 64, 70):
        np.testing.assert_array_equal(bits(run(x[:rows], w)), alone[:rows], err_msg=f"{rows} rows")


def test_output_has_the_same_bits_wherever_the_matrix_is_cut(linear):
    """Remainders of the output tiling and chunks of other threads must not change a result."""
    x, w = normal(0, 6, 576), normal(1, 1000, 576)
    whole = bits(linear(x, w))
    for start, stop in ((0, 1), (1, 3), (5, 501), (998, 1000)):
        np.testing.assert_array_equal(bits(linear(x, w[start:stop])), whole[:, start:stop])


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("depth", [576, 577, 583])
def test_bfloat16_weights_equal_their_float32_copies(linear, rows, depth):
    x, w = normal(0, rows, depth), normal(1, 40, depth, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(bits(linear(x, w)), bits(linear(x, w.astype(jnp.float32))))


def test_every_bfloat16_is_widened_exactly(linear):
    """Products with x = 1 return every finite value unchanged (XLA's threads flush subnormal numbers to zero)."""
    values = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).astype(np.float32)
    size = np.abs(values)
    values = values[(size == 0) | (size >= np.finfo(np.float32).tiny) & (size < np.inf)]
    result = linear(jnp.ones((1, 1)), jnp.asarray(values[:, None], jnp.bfloat16))
    np.testing.assert_array_equal(result[0], values)


def test_rows_do_not_touch_each_other(linear):
    x, w = normal(0, 6, 100), normal(1, 10, 100)
    clean = bits(linear(x, w))
    spoiled = bits(linear(x.at[2].set(jnp.nan).at[4].set(jnp.inf), w))
    np.testing.assert_array_equal(spoiled[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


# Control flow and threads


def test_inside_jit_while_loop_and_switch(linear):
    """The shape of the decode loop: a loop over a switch whose branches have different numbers of rows."""
    x, w = normal(0, 8, 64), normal(1, 64, 64) / 16

    def branch(rows: int):
        return lambda x: x.at[:rows].set(linear(x[:rows], w))

    @jax.jit
    def run(x, steps):
        def body(carry):
            i, x = carry
            return i + 1, jax.lax.switch(i % 4, [branch(rows) for rows in (1, 2, 4, 8)], x)

        return jax.lax.while_loop(lambda carry: carry[0] < steps, body, (0, x))[1]

    expected = np.asarray(x, np.float64)
    for i in range(11):
        rows = (1, 2, 4, 8)[i % 4]
        expected[:rows] = expected[:rows] @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(run(x, 11), expected, rtol=1e-4, atol=1e-6)


def test_independent_calls_in_one_program(linear):
    x, weights = normal(0, 4, 256), [normal(i, 700, 256) for i in range(1, 13)]
    together = jax.jit(lambda x, weights: [linear(x, w) for w in weights])
    alone = [linear(x, w) for w in weights]
    for _ in range(20):
        for result, expected in zip(together(x, weights), alone, strict=True):
            np.testing.assert_array_equal(bits(result), bits(expected))


def test_programs_in_several_threads(linear):
    x, weights = normal(0, 3, 200), [normal(i, 900, 200) for i in range(1, 5)]
    run = jax.jit(linear)
    expected = [bits(run(x, w)) for w in weights]
    equal = []

    def work(w, want):
        equal.extend(np.array_equal(bits(run(x, w)), want) for _ in range(50))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(weights, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert equal == [True] * 200


MANY_CALLS = """
assert skinny_matmul.KERNEL.build(cache)
w = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (2000, 300)), jnp.float32)
run = jax.jit(lambda x, w: [skinny_matmul.linear(x + i, w) for i in range(8)])
for device in jax.devices():
    x = jax.device_put(jnp.ones((3, 300)), device)
    for i, y in enumerate(run(x, jax.device_put(w, device))):
        assert np.array_equal(y, (1 + i) * np.sum(w, 1) * np.ones((3, 1))), i
print(len(jax.devices()))
"""


def test_two_host_devices(kernel_cache):
    assert python(MANY_CALLS, kernel_cache, XLA_FLAGS="--xla_force_host_platform_device_count=2") == "2"


def test_no_deadlock_when_every_pool_has_one_thread(kernel_cache):
    assert python(MANY_CALLS, kernel_cache, NPROC="1", XLA_FLAGS="--xla_cpu_multi_thread_eigen=false") == "1"


# Processes and caches


def test_persistent_compilation_cache_serves_a_second_process(kernel_cache, tmp_path):
    code = """
import jax.monitoring
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
assert skinny_matmul.KERNEL.build(cache)
y = jax.jit(skinny_matmul.linear)(jnp.ones((2, 9)), jnp.arange(27.0).reshape(3, 9))
print(y.tolist(), any(hits))
"""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    row = [36.0, 117.0, 198.0]
    assert python(code, kernel_cache, **settings) == f"{[row, row]} False"
    assert python(code, kernel_cache, **settings) == f"{[row, row]} True"


def test_processes_may_build_at_once(kernel_cache, tmp_path):
    code = """
assert skinny_matmul.KERNEL.build(cache) and skinny_matmul.KERNEL.build(cache)
print(len(list(cache.iterdir())))
"""
    printed = []
    threads = [threading.Thread(target=lambda: printed.append(python(code, tmp_path / "new"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(printed) == 2
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".so"]  # nothing half-written stays behind


REPORT = "built = skinny_matmul.KERNEL.build(cache)\nprint(built, skinny_matmul.KERNEL.reason)"


def test_without_a_compiler(tmp_path):
    printed = python(REPORT, tmp_path, CXX="/nonexistent")
    assert printed == "False no C++ compiler found (tried /nonexistent): install g++ or clang++, or set CXX"


def test_with_a_compiler_that_fails(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'fatal error: out of ideas' >&2\nexit 3\n")
    broken.chmod(0o755)
    printed = python(REPORT, tmp_path / "cache", CXX=str(broken))
    assert printed == f"False {broken} failed with exit code 3: fatal error: out of ideas"


def test_with_a_file_in_place_of_the_cache_folder(kernel_cache, tmp_path):
    (tmp_path / "taken").write_text("")
    printed = python(REPORT, tmp_path / "taken")
    assert printed.startswith("False ") and "taken" in printed


def test_use_before_build_is_an_error(tmp_path):
    code = """
try:
    skinny_matmul.linear(jnp.ones((1, 2)), jnp.ones((3, 2)))
except RuntimeError as error:
    print(error)
"""
    assert python(code, tmp_path) == "the skinny matmul kernel cannot be used: build() has not been called"


def test_other_dtypes_are_refused(linear):
    with pytest.raises(TypeError, match="bfloat16 and float32"):
        linear(jnp.ones((1, 2), jnp.bfloat16), jnp.ones((3, 2)))
    with pytest.raises(TypeError, match="float16"):
        linear(jnp.ones((1, 2)), jnp.ones((3, 2), jnp.float16))


def test_shapes_that_do_not_fit_are_refused(kernel_cache):
    """By the native code too: a wrong shape there would read beyond an array."""
    call = jax.ffi.ffi_call(skinny_matmul.KERNEL.target, jax.ShapeDtypeStruct((1, 3), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit together"):
        jax.block_until_ready(call(jnp.ones((1, 2)), jnp.ones((3, 4))))


# The benchmark


def test_benchmark_prints_its_table_and_one_json_line(kernel_cache, capsys):
    arguments = ["--rows", "1", "2", "--layers", "1", "--repeats", "2", "--cache-dir", str(kernel_cache)]
    assert runpy.run_path(str(ROOT / "scripts" / "bench_matmul.py"))["main"](arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(lines[-1])["results"]
    assert {rows: len(variants) for rows, variants in results.items()} == {"1": 4, "2": 4}
    assert all(r["min_ms"] <= r["median_ms"] <= r["max_ms"] for v in results.values() for r in v.values())
