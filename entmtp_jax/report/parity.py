"""Comparison of a text with plain decoding's, and how sure plain decoding was where they part."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.attention import causal_mask
from entmtp_jax.backbone.cache import init_cache
from entmtp_jax.backbone.transformer import Backbone
from entmtp_jax.types import Array, Float, Int, Params

EXCUSED_MARGIN = 1e-4  # float32: below it two sums in different order may choose different tokens
LENGTH_STEP = 64


class Parity(NamedTuple):
    """Result of one comparison; the names are those of the JSON output.

    Attributes:
      equal: the token ids are the same.
      first_difference: index of the first new token that differs, or None.
      margin: difference of plain decoding's two largest logits there, or None.
    """

    equal: bool
    first_difference: int | None
    margin: float | None


def compare(
    prompt: Sequence[int], ours: Sequence[int], plain: Sequence[int], margin_after: Callable[[Sequence[int]], float]
) -> Parity:
    """Compares new tokens; ``margin_after(text)`` tells the top-2 margin of the token after a text."""
    if list(ours) == list(plain):
        return Parity(True, None, None)
    shorter = min(len(ours), len(plain))
    place = next((i for i in range(shorter) if ours[i] != plain[i]), shorter)
    return Parity(False, place, margin_after([*prompt, *plain[:place]]))


def margin_function(backbone: Backbone, params: Params) -> Callable[[Sequence[int]], float]:
    """``text -> difference of the two largest logits after it``, by one pass over the whole text."""

    @jax.jit
    def top_two(params: Params, tokens: Int[Array, "1 T"], last: Int[Array, ""]) -> Float[Array, "1 2"]:
        cache = init_cache(backbone.config, batch=1, slots=1, dtype=jnp.float32)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        mask = causal_mask(tokens.shape[1])
        out = backbone.forward(params, tokens, positions, mask, cache, jnp.zeros(1, jnp.int32))
        return jax.lax.top_k(backbone.unembed(params, out.normed[:, last]), 2)[0]

    def margin(text: Sequence[int]) -> float:
        padded = np.zeros((1, -(-len(text) // LENGTH_STEP) * LENGTH_STEP), np.int32)
        padded[0, : len(text)] = text
        first, second = np.asarray(top_two(params, jnp.asarray(padded), jnp.int32(len(text) - 1)))[0]
        return float(first - second)

    return margin
