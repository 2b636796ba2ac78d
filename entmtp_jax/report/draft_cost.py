"""What drafting costs beside verification, on this device."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.transformer import Backbone
from entmtp_jax.decode import DecodeState, ModelParams
from entmtp_jax.heads.interface import Features, Head
from entmtp_jax.topology import Topology
from entmtp_jax.types import Array, Int, RowInts

CALLS = 8  # of each part in one timed program


class DraftCost(NamedTuple):
    """Milliseconds of the parts of a step, quartiles of the repeats.

    Attributes:
      draft: the head fills the tree.
      advance: the head takes in the committed tokens, as many as the tree is deep and one more.
      verify: the backbone's pass over the tree, its logits included.
    """

    draft: tuple[float, float, float]
    advance: tuple[float, float, float]
    verify: tuple[float, float, float]

    @property
    def share(self) -> float:
        """Drafting and taking in, over verification: medians."""
        return (self.draft[1] + self.advance[1]) / self.verify[1]


def draft_cost(
    backbone: Backbone, head: Head, params: ModelParams, state: DecodeState, topology: Topology, *, repeats: int = 9
) -> DraftCost:
    """Times the parts of a step with one topology, interleaved and compiled apart.

    Args:
      backbone: verifies.
      head: drafts.
      params: of both.
      state: after a prefill; its text is what is attended to.
      topology: of depth 1 or more.
      repeats: timed turns; each runs every part ``CALLS`` times, one after the other.
    """
    parts = {
        "draft": _repeated(functools.partial(_draft, head, topology)),
        "advance": _repeated(functools.partial(_advance, backbone, head, topology)),
        "verify": _repeated(functools.partial(_verify, backbone, topology)),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(-1, repeats):  # the first turn compiles
        for name, run in parts.items():
            began = time.perf_counter()
            jax.block_until_ready(run(params, state))
            if repeat >= 0:
                times[name].append(1e3 * (time.perf_counter() - began) / CALLS)
    return DraftCost(*(_quartiles(times[name]) for name in ("draft", "advance", "verify")))


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def _repeated(part: Callable[[ModelParams, DecodeState, RowInts], RowInts]) -> Callable[..., Any]:
    """Calls a part in a loop on the device; each call's root depends on the result before, so none is left out."""

    @jax.jit
    def run(params: ModelParams, state: DecodeState) -> RowInts:
        root = jnp.take_along_axis(state.tokens, state.text_length[:, None] - 1, axis=1)[:, 0]
        return jax.lax.fori_loop(0, CALLS, lambda _, root: part(params, state, root), root)

    return run


def _draft(head: Head, topology: Topology, params: ModelParams, state: DecodeState, root: RowInts) -> RowInts:
    # What follows from the head's state alone would be computed once for all calls, so the state depends on the root.
    nothing = root[0] * jnp.zeros(())
    head_state = jax.tree.map(lambda leaf: leaf + nothing.astype(leaf.dtype), state.head)
    proposal = head.propose(params.head, params.shared, head_state, root, topology.depth)
    draft = head.complete(params.head, params.shared, head_state, root, proposal, topology)
    return draft.tokens.max(axis=1)


def _advance(
    backbone: Backbone, head: Head, topology: Topology, params: ModelParams, state: DecodeState, root: RowInts
) -> RowInts:
    batch, count = root.shape[0], topology.depth + 1
    tokens = root[:, None] + jnp.zeros((1, count), jnp.int32)
    positions = state.text_length[:, None] - 1 + jnp.arange(count, dtype=jnp.int32)
    hidden = jnp.broadcast_to(root[:, None, None] * 1e-6, (batch, count, backbone.config.hidden_size))
    features = Features(hidden, hidden, ())
    valid = jnp.ones((batch, count), bool)
    new = head.advance(params.head, params.shared, state.head, features, tokens, tokens, positions, valid)
    return _depend_on(root, new)


def _depend_on(root: RowInts, values: Any) -> RowInts:
    """The root, computed from all of the values: zero times their sum is not folded away for floats."""
    sums = [leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(values)]
    return root + (0.0 * sum(sums, jnp.zeros(()))).astype(jnp.int32)


def _verify(
    backbone: Backbone, topology: Topology, params: ModelParams, state: DecodeState, root: RowInts
) -> Int[Array, " B"]:
    lengths = state.text_length - 1
    tokens = root[:, None] + jnp.zeros((1, topology.num_rows), jnp.int32)
    positions = lengths[:, None] + jnp.asarray(topology.depths)
    mask = jnp.asarray(topology.self_mask)[None]
    out = backbone.forward(params.backbone, tokens, positions, mask, state.cache, lengths)
    return jnp.argmax(backbone.unembed(params.backbone, out.normed), axis=-1).max(axis=1).astype(jnp.int32)
