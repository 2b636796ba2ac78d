"""How matrices are multiplied: one function per kind, and the choice among them by a quick probe.

Weights are ``[out, in]``. Every kind accumulates in float32 and returns float32; ``float32`` means
``Precision.HIGHEST`` on every platform, so that it is real float32 on TPU too.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from entmtp_jax.device import device_name
from entmtp_jax.errors import UserError
from entmtp_jax.json_files import read_json, write_json
from entmtp_jax.kernels import skinny_matmul
from entmtp_jax.types import Array, Float

# ``(x[..., in], weight[out, in]) -> y[..., out]`` in float32.
Linear: TypeAlias = Callable[[Array, Array], Array]


def linear_highest(x: Float[Array, "*any I"], weight: Float[Array, "O I"]) -> Float[Array, "*any O"]:
    """Float32 product at the highest precision of the platform."""
    return _contract(x.astype(jnp.float32), weight.astype(jnp.float32), jax.lax.Precision.HIGHEST)


def linear_bfloat16(x: Float[Array, "*any I"], weight: Float[Array, "O I"]) -> Float[Array, "*any O"]:
    """Product of bfloat16 operands with float32 accumulation and result."""
    return _contract(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), jax.lax.Precision.DEFAULT)


def linear_bfloat16_two_rows(x: Float[Array, "*any I"], weight: Float[Array, "O I"]) -> Float[Array, "*any O"]:
    """``linear_bfloat16`` that never multiplies a single row.

    XLA's CPU backend turns a one-row bfloat16 product into a scalar loop (200 ms for the matrices of a
    135M model, 30-60 ms for two rows), so a lone row is doubled.
    """
    rows = x.size // x.shape[-1]
    if rows > 1:
        return linear_bfloat16(x, weight)
    doubled = jnp.concatenate([x.reshape(1, -1)] * 2)
    return linear_bfloat16(doubled, weight)[:1].reshape(*x.shape[:-1], weight.shape[0])


def _contract(
    x: Float[Array, "*any I"], weight: Float[Array, "O I"], precision: jax.lax.Precision
) -> Float[Array, "*any O"]:
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32)


def linear_kernel(x: Float[Array, "*any I"], weight: Float[Array, "O I"]) -> Float[Array, "*any O"]:
    """Product by the CPU kernel: weights of either dtype, float32 activations and sums.

    A row's result does not depend on how many rows there are, bit for bit; see ``kernels.skinny_matmul``.
    """
    rows = skinny_matmul.linear(x.astype(jnp.float32).reshape(-1, x.shape[-1]), weight)
    return rows.reshape(*x.shape[:-1], weight.shape[0])


PROBE_SHAPE = (3072, 576)  # out, in: of the size of a small model's largest layer matrix
PROBE_ROWS = (1, 8)  # plain decoding and a small tree
PROBE_MATRICES = 8  # more bytes than the caches hold
PROBE_TURNS = 7
CHOICES_FILE = "arithmetic.json"


def choose_linear(dtype: str, cache: Path) -> tuple[Linear, str]:
    """The fastest matrix product for weights of a dtype on this machine.

    On an accelerator XLA's own product is taken. On a CPU the candidates are timed once on a few matrices, for one
    row and for a small tree: how they compare differs by processor and compiler. The winner is kept in the cache
    folder, since timing again could pick another one and so ask for other compiled programs.

    Args:
      dtype: ``float32`` or ``bfloat16``.
      cache: where the compiled kernel and the choice are kept.

    Returns:
      The product, and its name for reports.
    """
    xla = linear_highest if dtype == "float32" else linear_bfloat16
    if jax.default_backend() != "cpu":
        return xla, "xla"
    candidates = {"xla": linear_highest if dtype == "float32" else linear_bfloat16_two_rows}
    if skinny_matmul.KERNEL.build(cache):
        candidates["kernel"] = linear_kernel
    if len(candidates) == 1:
        return candidates["xla"], f"xla ({skinny_matmul.KERNEL.reason})"
    key = f"{device_name()}, {dtype}, jax {jax.__version__}, {skinny_matmul.KERNEL.library}"
    best = _kept_choices(cache).get(key)
    if best not in candidates:
        best = min(probe_s(candidates, jnp.dtype(dtype)).items(), key=lambda pair: pair[1])[0]
        with contextlib.suppress(UserError):  # a cache that cannot be written costs a probe per start, no more
            write_json(cache / CHOICES_FILE, _kept_choices(cache) | {key: best})
    return candidates[best], best


def _kept_choices(cache: Path) -> dict[str, str]:
    """Names of products by machine, dtype and version; what cannot be read is measured again."""
    try:
        kept = read_json(cache / CHOICES_FILE)
    except UserError:
        return {}
    return kept if isinstance(kept, dict) else {}


def probe_s(candidates: Mapping[str, Linear], dtype: DTypeLike) -> dict[str, float]:
    """Seconds that each candidate takes for the probe's matrices, summed over its row counts; the best of a few each.

    The candidates take turns, so that a busy moment of the machine does not fall on one of them alone.
    """
    weights = [jnp.full(PROBE_SHAPE, 0.01, dtype) for _ in range(PROBE_MATRICES)]
    calls = {
        (name, rows): functools.partial(_products(linear), jnp.ones((rows, PROBE_SHAPE[1])), weights)
        for name, linear in candidates.items()
        for rows in PROBE_ROWS
    }
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(1 + PROBE_TURNS):  # the first one compiles
        for key, call in calls.items():
            start = time.perf_counter()
            call().block_until_ready()
            if turn:
                best[key] = min(best[key], time.perf_counter() - start)
    return {name: sum(best[name, rows] for rows in PROBE_ROWS) for name in candidates}


def _products(linear: Linear) -> Callable[[Array, list[Array]], Array]:
    @jax.jit
    def products(x: Float[Array, "T I"], weights: list[Float[Array, "O I"]]) -> Float[Array, "T I"]:
        for weight in weights:
            x = x + 1e-3 * linear(x, weight)[:, : x.shape[1]]
        return x

    return products
