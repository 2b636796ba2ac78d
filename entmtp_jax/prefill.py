"""The prompts' way through the backbone: chunks of one width, so that no prompt length compiles anything new."""

import jax
import jax.numpy as jnp

from entmtp_jax.backbone.attention import causal_mask
from entmtp_jax.backbone.cache import write_rows
from entmtp_jax.entropy import update_average
from entmtp_jax.heads.interface import Features
from entmtp_jax.parts import ModelParams, Parts
from entmtp_jax.scheduler import Policy
from entmtp_jax.state import DecodeState, Finish, emit, root_stats


def prefill(parts: Parts, params: ModelParams, state: DecodeState, policy: Policy) -> DecodeState:
    """Fills cache and head state from the prompts and emits each row's first token.

    Args:
      parts: functions and static choices.
      params: of backbone and head.
      state: from ``start_state``.
      policy: its decay makes the first update of the entropy average.
    """
    width = parts.config.chunk
    batch = state.tokens.shape[0]
    last = state.prompt_length - 1

    def one_chunk(carry: tuple) -> tuple:
        index, cache, head_state, root, stats = carry
        start = index * width
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, width, axis=1)
        following = jax.lax.dynamic_slice_in_dim(state.tokens, start + 1, width, axis=1)
        positions = jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32), (batch, width))
        # Rows whose prompt ended earlier run on padding: its slots are past their length, so nobody sees them.
        starts = jnp.full(batch, start, jnp.int32)
        out = parts.backbone.forward(params.backbone, tokens, positions, causal_mask(width), cache, starts)

        here = jnp.clip(last - start, 0, width - 1)[:, None]
        end = jnp.take_along_axis(out.normed, here[:, :, None], axis=1)
        logits = parts.backbone.unembed(params.backbone, end)
        chosen = parts.select(logits, state.seed, state.prompt_length[:, None])[:, 0]
        ends_here = (last >= start) & (last < start + width)
        root = jnp.where(ends_here, chosen, root)
        measured = root_stats(logits[:, 0])
        stats = jax.tree.map(lambda new, old: jnp.where(ends_here, new, old), measured, stats)
        following = jnp.where(positions == last[:, None], root[:, None], following)
        features = Features(out.hidden, out.normed, out.taps)
        valid = positions <= last[:, None]
        head_state = parts.head.advance(
            params.head, params.shared, head_state, features, tokens, following, positions, valid
        )
        return index + 1, write_rows(cache, out.new, starts), head_state, root, stats

    chunks = (state.prompt_length.max() + width - 1) // width
    first = (jnp.int32(0), state.cache, state.head, jnp.zeros(batch, jnp.int32), state.root_stats)
    _, cache, head_state, root, stats = jax.lax.while_loop(lambda carry: carry[0] < chunks, one_chunk, first)
    running = state.finish == Finish.RUNNING
    state, _ = emit(state._replace(cache=cache, head=head_state), root[:, None], jnp.ones(batch, jnp.int32), stats)
    average = update_average(state.entropy_average, stats.entropy_nats, policy.decay, running)
    return state._replace(entropy_average=average)
