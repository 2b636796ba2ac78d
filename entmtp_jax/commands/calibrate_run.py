"""The calibrate command's work: traces, trees, costs, thresholds, and the bank at the end."""

import argparse
import functools
from collections.abc import Sequence

import numpy as np

from entmtp_jax.assemble import Draft, Model, load_draft, load_model
from entmtp_jax.bank import Bank, Calibration, save_bank
from entmtp_jax.calibration.fit import Ladder, fit_ladder
from entmtp_jax.calibration.replay import Trace, accepted_lengths, grow_topology
from entmtp_jax.calibration.trace import KnownText, trace_texts
from entmtp_jax.cli import notify
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.device import device_name
from entmtp_jax.errors import UserError
from entmtp_jax.generation import compile_decoder
from entmtp_jax.hub import cache_folder, enable_compile_cache
from entmtp_jax.report.measure import COST_PROMPT, Cost, step_costs
from entmtp_jax.scheduler import DEFAULT_WINDOW, Signal, fixed
from entmtp_jax.state import Request
from entmtp_jax.topology import Topology, autoregressive
from entmtp_jax.training.data import load_records
from entmtp_jax.training.examples import held_out_records
from entmtp_jax.training.features import load_features, record_starts
from entmtp_jax.training.provenance import collect_provenance


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Traces, grows, measures, fits, saves; ``arguments`` are the same flags as words, for the bank's record."""
    cache = cache_folder(args.cache_dir)
    enable_compile_cache(cache)
    model = load_model(args.model, dtype=args.dtype, cache=cache, notify=notify)
    wide = Topology.from_paths("ranks", [(rank,) for rank in range(args.top_k)])
    draft = load_draft(model, args.heads, Bank("ranks", (wide,)), notify=notify)
    depth = draft.head.max_depth
    unembed = functools.partial(model.backbone.unembed, model.params)
    trace = trace_texts(draft.head, draft.params, model.shared, unembed, _held_out(args), depth=depth)
    topologies = _grow(trace, args, depth)
    bank = Bank(args.name, (autoregressive(), *topologies))
    costs = _costs(model, draft, bank, args)
    ladder = fit_ladder(trace, bank, {n: c.median_ms for n, c in costs.items()}, decay=1 - 1 / DEFAULT_WINDOW)
    _report(bank, trace, costs, ladder)
    save_bank(_finished(bank, trace, costs, ladder, args, arguments), args.out)
    notify(f"wrote {args.out}")
    return 0


def _held_out(args: argparse.Namespace) -> list[KnownText]:
    records = load_records(args.data)
    features = load_features(args.features)
    held = held_out_records(records)
    texts = []
    for record, start in record_starts(features).items():
        if held[record]:
            tokens = records.record(record)
            hidden = features.hidden[start : start + len(tokens)]
            texts.append(KnownText(tokens, int(records.prompt_length[record]), hidden))
    if not texts:
        raise UserError(f"{args.features}: no held-out record among these features; store more blocks")
    return texts


def _grow(trace: Trace, args: argparse.Namespace, depth: int) -> list[Topology]:
    """Trees of equal width for the calmer and the less sure half of the positions, and pooled ones.

    Where the text is predictable a deep tree keeps more than a bushy one of the same width, and elsewhere
    the other way round; that is what the entropy can choose between even where width is all that costs.
    """
    calm = trace.entropy_nats < np.median(trace.entropy_nats)
    halves = {"calm": _part(trace, calm), "unsure": _part(trace, ~calm)}
    wanted = [(f"{name}{rows}", part, rows) for rows in args.rows for name, part in halves.items()]
    wanted += [(f"tree{rows}", trace, rows) for rows in args.pooled_rows]
    grown: list[Topology] = []
    for name, part, rows in wanted:
        topology = grow_topology(name, part, rows - 1, max_depth=depth, max_rank=args.top_k - 1)
        if all(topology.rank_paths != other.rank_paths for other in grown):
            grown.append(topology)
    return grown


def _part(trace: Trace, chosen: np.ndarray) -> Trace:
    return Trace(trace.ranks[chosen], trace.entropy_nats[chosen], trace.text[chosen])


def _costs(model: Model, draft: Draft, bank: Bank, args: argparse.Namespace) -> dict[str, Cost]:
    decoder = build_decoder(model.backbone, draft.head, bank, DecodeConfig(capacity=args.capacity))
    params = ModelParams(model.params, draft.params)
    compiled, seconds = compile_decoder(decoder, params, fixed(0, num_topologies=len(bank.topologies)))
    notify(f"compiled {len(bank.topologies)} topologies in {seconds:.1f} s; timing their steps")
    request = Request(model.text.chat(COST_PROMPT), 1)
    return step_costs(compiled, params, [request])


def _report(bank: Bank, trace: Trace, costs: dict[str, Cost], ladder: Ladder) -> None:
    notify(
        "| topology | rows | depth | expected tokens/step | ms/step | expected tokens/s |\n|---|--:|--:|--:|--:|--:|"
    )
    for topology in bank.topologies:
        expected = 1 + accepted_lengths(trace, topology).mean()
        cost = costs[topology.name]
        notify(
            f"| {topology.name} | {topology.num_rows} | {topology.depth} | {expected:.3f} | {cost.median_ms:.1f} "
            f"({cost.low_ms:.1f} .. {cost.high_ms:.1f}) | {1e3 * expected / cost.median_ms:.1f} |"
        )
    edges = ", ".join(f"{edge:.3f}" for edge in ladder.edges_nats)
    notify(
        f"ladder: {' / '.join(ladder.topology_by_bin)} at entropy edges [{edges}] nats: "
        f"{ladder.tokens_per_step:.3f} tokens/step, {ladder.tokens_per_s:.1f} tokens/s by replay"
    )


def _finished(
    bank: Bank, trace: Trace, costs: dict[str, Cost], ladder: Ladder, args: argparse.Namespace, arguments: Sequence[str]
) -> Bank:
    calibration = Calibration(
        device=device_name(),
        dtype=args.dtype,
        batch=1,
        signal=Signal.ENTROPY_EMA.name.lower(),
        edges_nats=ladder.edges_nats,
        topology_by_bin=ladder.topology_by_bin,
        step_ms=tuple((name, round(cost.median_ms, 2)) for name, cost in costs.items()),
    )
    expected = {t.name: round(float(accepted_lengths(trace, t).mean()), 4) for t in bank.topologies}
    made_by = collect_provenance("scripts/calibrate.py", arguments) | {"held_out_positions": len(trace.ranks)}
    return Bank(bank.name, bank.topologies, (calibration,), made_by=made_by, expected_accepted=expected)
