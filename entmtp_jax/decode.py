"""The decoding loop: step and run, compiled once per (batch, capacity, bank).

A step proposes (only what the signals need), chooses a topology, completes and verifies the tree in the
chosen branch of a ``lax.switch``, and commits once after the switch. A branch reads the cache and returns
only the accepted rows' keys and values; a cache that passed through the switch would be copied every step.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entmtp_jax.acceptance import accept_matching
from entmtp_jax.backbone.cache import KVCache, gather_rows, init_cache, write_rows
from entmtp_jax.backbone.transformer import Backbone
from entmtp_jax.bank import Bank
from entmtp_jax.entropy import update_average
from entmtp_jax.heads.interface import Features, Head, Proposal
from entmtp_jax.parts import DecodeConfig, ModelParams, Parts
from entmtp_jax.prefill import prefill
from entmtp_jax.sampling import Select, greedy
from entmtp_jax.scheduler import Policy, choose
from entmtp_jax.state import DecodeState, Finish, Request, RootStats, current_signals, emit, root_stats, start_state
from entmtp_jax.topology import Topology, check_fits
from entmtp_jax.trace import StepRecord, record
from entmtp_jax.types import Array, Float, Int, RowInts

__all__ = ["DecodeConfig", "Decoder", "ModelParams", "build_decoder"]


class Decoder(NamedTuple):
    """Decoding of one backbone, head and bank as functions; build it once.

    Attributes:
      config: static choices.
      bank: the topologies; a policy's indices point into it.
      start: ``requests -> state`` before the prefill, on the host.
      prefill: ``(params, state, policy) -> state``; consumes the state.
      step: ``(params, state, policy) -> state``, not compiled.
      run: ``(params, state, policy, max_steps) -> state``, until every row is finished or ``max_steps``
        steps are done; consumes the state.
    """

    config: DecodeConfig
    bank: Bank
    start: Callable[[list[Request | None]], DecodeState]
    prefill: Callable[[ModelParams, DecodeState, Policy], DecodeState]
    step: Callable[[ModelParams, DecodeState, Policy], DecodeState]
    run: Callable[[ModelParams, DecodeState, Policy, int], DecodeState]


class _Verified(NamedTuple):
    """What a branch returns; E is the bank's depth + 1, whichever topology ran."""

    rows_tokens: Int[Array, "B E"]  # tokens on the accepted path, the root first
    tokens: Int[Array, "B E"]  # tokens to emit
    count: RowInts  # how many of them count
    new: KVCache
    features: Features
    stats: RootStats


def build_decoder(
    backbone: Backbone, head: Head, bank: Bank, config: DecodeConfig, *, select: Select = greedy
) -> Decoder:
    """Builds and jits the loop; nothing is compiled before the first call.

    Args:
      backbone: verifies.
      head: drafts.
      bank: topologies to switch among; one of depth 0 is plain decoding.
      config: static choices.
      select: how a token is chosen from logits.

    Raises:
      UserError: a topology is deeper or wider than the head, its candidates or the cache allow.
    """
    for topology in bank.topologies:
        check_fits(topology, num_heads=head.max_depth, top_k=head.top_k, capacity=config.capacity)
    parts = Parts(backbone, head, bank, config, select)
    step = functools.partial(_step, parts)
    return Decoder(
        config=config,
        bank=bank,
        start=functools.partial(_start, parts),
        prefill=jax.jit(functools.partial(prefill, parts), donate_argnums=1),
        step=step,
        run=jax.jit(functools.partial(_run, step), donate_argnums=1),
    )


def _start(parts: Parts, requests: list[Request | None]) -> DecodeState:
    config = parts.config
    dtype = jnp.dtype(config.cache_dtype)
    cache = init_cache(parts.backbone.config, batch=config.batch, slots=parts.cache_slots, dtype=dtype)
    return start_state(
        requests,
        capacity=config.capacity,
        token_slots=parts.token_slots,
        cache=cache,
        head=parts.head.init_state(config.batch, parts.cache_slots),
    )


def _step(parts: Parts, params: ModelParams, state: DecodeState, policy: Policy) -> DecodeState:
    """One pass of the backbone: propose, choose, verify in a branch, commit."""
    head, bank = parts.head, parts.bank
    live = state.finish == Finish.RUNNING
    lengths = state.text_length - 1
    root = jnp.take_along_axis(state.tokens, lengths[:, None], axis=1)[:, 0]
    proposal, path_value = None, jnp.zeros_like(state.root_stats.top1_prob)
    if parts.config.fresh_signals and bank.depth > 0:
        proposal = head.propose(params.head, params.shared, state.head, root, bank.depth)
        path_value = state.root_stats.top1_prob * jnp.exp(proposal.chain_logprobs.sum(axis=1))
    signals = current_signals(state, policy.decay, path_value)
    index = choose(policy, signals, state.topology, state.steps, live)

    branches = [functools.partial(_verify, parts, topology) for topology in bank.topologies]
    verified = jax.lax.switch(index, branches, params, state, root, lengths, proposal)

    state, emitted = emit(state, verified.tokens, verified.count, verified.stats)
    places = jnp.arange(bank.depth + 1, dtype=jnp.int32)
    head_state = head.advance(
        params.head,
        params.shared,
        state.head,
        verified.features,
        verified.rows_tokens,
        verified.tokens,
        lengths[:, None] + places,
        places < emitted[:, None],
    )
    accepted = verified.count - 1
    # A step of depth 0 drafts nothing, so it says nothing about acceptance.
    drafted = live & jnp.asarray([topology.depth > 0 for topology in bank.topologies])[index]
    entry = StepRecord(
        topology=jnp.broadcast_to(index, accepted.shape),
        accepted=jnp.minimum(accepted, emitted),
        emitted=emitted,
        signals=signals,
    )
    return state._replace(
        # Rows past the emitted ones land in slots that are not committed.
        cache=write_rows(state.cache, verified.new, lengths),
        head=head_state,
        entropy_average=update_average(state.entropy_average, verified.stats.entropy_nats, policy.decay, live),
        accepted_average=update_average(state.accepted_average, accepted.astype(jnp.float32), policy.decay, drafted),
        topology=jnp.where(live, index, state.topology),
        steps=state.steps + live,
        trace=record(state.trace, entry, state.steps, live),
    )


def _verify(
    parts: Parts,
    topology: Topology,
    params: ModelParams,
    state: DecodeState,
    root: RowInts,
    lengths: RowInts,
    proposal: Proposal | None,
) -> _Verified:
    """One branch of the switch: the tree of one topology, drafted, verified and cut to the accepted path."""
    backbone, head = parts.backbone, parts.head
    candidates = root[:, None]
    if topology.depth > 0:
        shared = params.shared
        if proposal is None:
            proposal = head.propose(params.head, shared, state.head, root, topology.depth)
        candidates = head.complete(params.head, shared, state.head, root, proposal, topology).tokens
    positions = lengths[:, None] + jnp.asarray(topology.depths)
    self_mask = jnp.asarray(topology.self_mask)[None]
    out = backbone.forward(params.backbone, candidates, positions, self_mask, state.cache, lengths)
    logits = backbone.unembed(params.backbone, out.normed)
    chosen = parts.select(logits, state.seed, positions + 1)
    accepted = accept_matching(candidates, chosen, topology)

    padding = ((0, 0), (0, parts.bank.depth - topology.depth))
    rows = jnp.pad(accepted.rows, padding, mode="edge")
    last = jnp.take_along_axis(logits, rows[:, -1, None, None], axis=1)[:, 0]
    pick = functools.partial(_pick_rows, rows)
    return _Verified(
        rows_tokens=jnp.take_along_axis(candidates, rows, axis=1),
        tokens=jnp.pad(accepted.tokens, padding, mode="edge"),
        count=accepted.length + 1,
        new=gather_rows(out.new, rows),
        features=jax.tree.map(pick, Features(out.hidden, out.normed, out.taps)),
        stats=root_stats(last),
    )


def _pick_rows(rows: Int[Array, "B E"], values: Float[Array, "B N D"]) -> Float[Array, "B E D"]:
    return jnp.take_along_axis(values, rows[:, :, None], axis=1)


def _run(
    step: Callable[[ModelParams, DecodeState, Policy], DecodeState],
    params: ModelParams,
    state: DecodeState,
    policy: Policy,
    max_steps: Int[Array, ""],
) -> DecodeState:
    def unfinished(carry: tuple[Any, DecodeState]) -> Array:
        return (carry[0] < max_steps) & (carry[1].finish == Finish.RUNNING).any()

    def advance(carry: tuple[Any, DecodeState]) -> tuple[Any, DecodeState]:
        return carry[0] + 1, step(params, carry[1], policy)

    return jax.lax.while_loop(unfinished, advance, (jnp.int32(0), state))[1]
