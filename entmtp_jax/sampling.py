"""How the backbone's next token is chosen from its logits: one function for plain and tree decoding alike."""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp

from entmtp_jax.types import Array, Float, Int, RowInts

# ``(logits[B, T, V], seeds[B], positions[B, T]) -> tokens[B, T]``. A choice may depend on the row's seed and
# the absolute position of the chosen token, and on nothing else that differs between plain decoding and a
# tree; that is what makes their texts equal.
Select: TypeAlias = Callable[[Array, RowInts, Array], Array]


def greedy(logits: Float[Array, "B T V"], seeds: RowInts, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The most probable token; the lowest id among equals."""
    del seeds, positions
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
