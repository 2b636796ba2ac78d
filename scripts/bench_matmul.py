"""Times the matrix products of one decoding step on this CPU: XLA's against the skinny kernel's.

    python scripts/bench_matmul.py
    python scripts/bench_matmul.py --rows 1 8 --repeats 15

One measurement runs all matrices of SmolLM2-135M in the order of a forward pass, each product feeding the next:
30 layers of [960, 576], [576, 576], [3072, 576] and [576, 1536], then the output matrix [49152, 576]. The variants
take turns, compilation is timed apart, and the table shows the median in milliseconds with the range.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.hub import cache_folder
from entmtp_jax.kernels import skinny_matmul

LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
OUTPUT_SHAPE = (49152, 576)

Linear = Callable[[jax.Array, jax.Array], jax.Array]


class Variant(NamedTuple):
    """One way to compute the products."""

    linear: Linear
    dtype: jnp.dtype


def xla_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same product by XLA: operands in the weights' dtype, float32 result."""
    return jax.lax.dot_general(x.astype(w.dtype), w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


VARIANTS = {
    "xla float32": Variant(xla_linear, jnp.dtype(jnp.float32)),
    "xla bfloat16": Variant(xla_linear, jnp.dtype(jnp.bfloat16)),
    "kernel float32": Variant(skinny_matmul.linear, jnp.dtype(jnp.float32)),
    "kernel bfloat16": Variant(skinny_matmul.linear, jnp.dtype(jnp.bfloat16)),
}


def random_weights(num_layers: int, seed: int) -> list[jax.Array]:
    """All matrices of the step in float32, in the order of use."""
    rng = np.random.default_rng(seed)
    shapes = [*LAYER_SHAPES * num_layers, OUTPUT_SHAPE]
    return [jnp.asarray(rng.standard_normal(shape, dtype=np.float32) / np.sqrt(shape[1])) for shape in shapes]


def all_products(linear: Linear) -> Callable[[jax.Array, list[jax.Array]], jax.Array]:
    """One compiled pass over all matrices; an input longer than the next matrix is deep is cut."""

    def run(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            x = linear(x[:, : w.shape[1]], w)
        return x

    return jax.jit(run)


def seconds(run: Callable, *args: object) -> float:
    """Wall time of one call, its result awaited."""
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start


def measure(names: list[str], num_rows: int, repeats: int, weights: dict[str, list[jax.Array]]) -> dict[str, dict]:
    """Times the named variants for one number of rows, taking turns.

    Returns:
      Per variant: ``median_ms``, ``min_ms``, ``max_ms`` and ``compile_s`` (first call, compilation included).
    """
    x = jnp.asarray(np.random.default_rng(num_rows).standard_normal((num_rows, 576), dtype=np.float32))
    runs = {name: all_products(VARIANTS[name].linear) for name in names}
    compile_s = {name: seconds(runs[name], x, weights[VARIANTS[name].dtype.name]) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            times[name].append(1e3 * seconds(runs[name], x, weights[VARIANTS[name].dtype.name]))
    return {
        name: {
            "median_ms": round(float(np.median(t)), 2),
            "min_ms": round(min(t), 2),
            "max_ms": round(max(t), 2),
            "compile_s": round(compile_s[name], 2),
        }
        for name, t in times.items()
    }


def machine() -> dict[str, str | int | float]:
    """What the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "cpu": models[0].split(":")[1].strip() if models else platform.processor(),
        "cores": os.cpu_count() or 0,
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def main(argv: list[str] | None = None) -> int:
    """Prints the table, the machine and, last, everything as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="numbers of rows to time")
    parser.add_argument("--repeats", type=int, default=9, help="timed calls per variant")
    parser.add_argument("--layers", type=int, default=30, help="number of layers; fewer for a quick look")
    parser.add_argument("--cache-dir", help="folder for the compiled kernel (default: the package's cache folder)")
    args = parser.parse_args(argv)

    start = time.perf_counter()
    try:
        built = skinny_matmul.KERNEL.build(cache_folder(args.cache_dir))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    build_s = round(time.perf_counter() - start, 2)
    if not built:
        print(f"no kernel on this machine: {skinny_matmul.KERNEL.reason}", file=sys.stderr)
    names = [name for name in VARIANTS if built or name.startswith("xla")]
    full = random_weights(args.layers, seed=0)
    weights = {"float32": full, "bfloat16": [w.astype(jnp.bfloat16) for w in full]}
    print(f"{'rows':>4}  " + "  ".join(f"{name:>22}" for name in names) + "   [median ms (min-max)]")
    results: dict[int, dict[str, dict]] = {}
    for num_rows in args.rows:
        results[num_rows] = measure(names, num_rows, args.repeats, weights)
        cells = [f"{r['median_ms']:.1f} ({r['min_ms']:.1f}-{r['max_ms']:.1f})" for r in results[num_rows].values()]
        print(f"{num_rows:>4}  " + "  ".join(f"{cell:>22}" for cell in cells), flush=True)
    compile_s = sum(r["compile_s"] for per_variant in results.values() for r in per_variant.values())
    print(f"kernel built or loaded in {build_s} s; first calls, compilation included, {compile_s:.1f} s")
    print("machine: " + ", ".join(f"{key} {value}" for key, value in machine().items()))
    print(json.dumps({"machine": machine(), "build_s": build_s, "repeats": args.repeats, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
