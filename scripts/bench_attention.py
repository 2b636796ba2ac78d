"""Times the attention of one decoding step on this CPU: XLA's over the whole cache against the kernel's.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --rows 1 8 --filled 100 500 --repeats 31

One measurement runs the attention of all layers of SmolLM2-135M (9 heads, 3 groups, 64 wide, 512 slots), each
feeding the next with a cache of its own, as a forward pass does. Both take turns; compilation is apart.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.attention import Attend, two_part_attention
from entmtp_jax.cli import run_main
from entmtp_jax.device import device_name
from entmtp_jax.errors import UserError
from entmtp_jax.hub import cache_folder
from entmtp_jax.kernels import tree_attention

LAYERS, HEADS, GROUPS, SIZE, SLOTS = 30, 9, 3, 64, 512


def all_layers(attend: Attend):
    """One compiled pass: ``(query, keys, values, mask, caches, lengths) -> query``."""

    @jax.jit
    def run(query, keys, values, mask, caches, lengths):
        for cached_keys, cached_values in caches:
            query = query + 1e-3 * attend(query, keys, values, mask, cached_keys, cached_values, lengths)
        return query

    return run


def inputs(rows: int, random: np.random.Generator):
    """Random arguments of a pass but its lengths; the mask is that of a random tree."""

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, dtype=np.float32))

    mask = np.eye(rows, dtype=bool)
    for row in range(1, rows):
        mask[row] |= mask[random.integers(row)]
    caches = [(normal(1, GROUPS, SLOTS, SIZE), normal(1, GROUPS, SLOTS, SIZE)) for _ in range(LAYERS)]
    new = normal(1, GROUPS, rows, SIZE), normal(1, GROUPS, rows, SIZE)
    return normal(1, rows, HEADS, SIZE), *new, jnp.asarray(mask[None]), caches


def run(args: argparse.Namespace) -> int:
    """Prints the table and, last, everything as one JSON line."""
    if not tree_attention.KERNEL.build(cache_folder(args.cache_dir)):
        raise UserError(f"no attention kernel on this machine: {tree_attention.KERNEL.reason}")
    if min(args.rows) < 1 or not 0 <= min(args.filled) <= max(args.filled) <= SLOTS:
        raise UserError(f"--rows must be positive and --filled between 0 and {SLOTS}")
    passes = {"xla": all_layers(two_part_attention), "kernel": all_layers(tree_attention.attend)}
    print(f"{device_name()}; milliseconds of all {LAYERS} layers, median (quartiles) of {args.repeats}")
    print("| rows | filled slots | xla | kernel | ratio (quartiles) |\n|--:|--:|--:|--:|--:|")
    results = []
    for rows in args.rows:
        fixed = inputs(rows, np.random.default_rng(rows))
        for filled in args.filled:
            lengths = jnp.full((1,), filled, jnp.int32)
            times = {name: np.zeros(args.repeats) for name in passes}
            for repeat in range(-1, args.repeats):  # the first turn compiles
                for name, one_pass in passes.items():
                    start = time.perf_counter()
                    one_pass(*fixed, lengths).block_until_ready()
                    times[name][max(repeat, 0)] = 1e3 * (time.perf_counter() - start)
            ratio = times["xla"] / times["kernel"]
            found = {name: np.percentile(t, (25, 50, 75)) for name, t in (times | {"ratio": ratio}).items()}
            cells = [f"{mid:.2f} ({low:.2f} .. {high:.2f})" for low, mid, high in found.values()]
            print(f"| {rows} | {filled} | " + " | ".join(cells) + " |", flush=True)
            results.append({"rows": rows, "filled": filled} | {name: q.tolist() for name, q in found.items()})
    print(json.dumps({"device": device_name(), "jax": jax.__version__, "repeats": args.repeats, "results": results}))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parses and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="numbers of rows to time")
    parser.add_argument("--filled", type=int, nargs="+", default=[100, 300, 500], help="filled slots of the cache")
    parser.add_argument("--repeats", type=int, default=21, help="timed turns")
    parser.add_argument("--cache-dir", help="folder of the compiled kernel")
    args = parser.parse_args(argv)
    return run_main(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
