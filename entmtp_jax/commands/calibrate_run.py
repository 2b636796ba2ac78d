"""The calibrate command's work: a trace, trees, costs, thresholds, and the bank at the end."""

import argparse
from collections.abc import Sequence

import numpy as np

from entmtp_jax.assemble import Draft, Model, load_draft, load_model
from entmtp_jax.bank import Bank, Calibration, save_bank
from entmtp_jax.calibration.fit import Ladder, fit_ladder
from entmtp_jax.calibration.growth import accepted_per_step, grow_where_steps_start
from entmtp_jax.calibration.replay import Trace
from entmtp_jax.calibration.trace_file import fingerprint_params, load_trace
from entmtp_jax.cli import notify
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.device import device_name
from entmtp_jax.errors import UserError
from entmtp_jax.generation import compile_decoder
from entmtp_jax.heads.interface import Head
from entmtp_jax.hub import cache_folder, enable_compile_cache
from entmtp_jax.report.measure import COST_PROMPT, Cost, step_costs
from entmtp_jax.scheduler import DEFAULT_WINDOW, Signal, fixed
from entmtp_jax.state import Request
from entmtp_jax.topology import Topology, autoregressive
from entmtp_jax.training.provenance import collect_provenance

MIN_POSITIONS = 16  # a calm and an unsure half with something in each


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Grows, measures, fits, saves; ``arguments`` are the same flags as words, for the bank's record."""
    cache = cache_folder(args.cache_dir)
    enable_compile_cache(cache)
    model = load_model(args.model, dtype=args.dtype, cache=cache, notify=notify)
    wide = Topology.from_paths("ranks", [(rank,) for rank in range(args.top_k)])
    draft = load_draft(model, args.heads, Bank("ranks", (wide,)), notify=notify)
    trace = _load(args, model, draft)
    topologies = _grow(trace, args, draft.head)
    bank = Bank(args.name, (autoregressive(), *topologies))
    costs = _costs(model, draft, bank, args)
    ladder = fit_ladder(trace, bank, {n: c.median_ms for n, c in costs.items()}, window=DEFAULT_WINDOW)
    _report(bank, trace, costs, ladder)
    save_bank(_finished(bank, trace, costs, ladder, args, arguments), args.out)
    notify(f"wrote {args.out}")
    return 0


def _load(args: argparse.Namespace, model: Model, draft: Draft) -> Trace:
    """The trace, if it is of this model and these heads and ranks enough candidates."""
    header, trace, *_ = load_trace(args.trace)
    if header.backbone_fingerprint != model.fingerprint:
        raise UserError(f"{args.trace}: traced on {header.model}, whose weights are not those of {model.name}")
    if header.head_fingerprint != fingerprint_params(draft.params) or header.head_kind != draft.head.name:
        raise UserError(f"{args.trace}: a trace of heads {header.heads!r}, whose weights are not those of {args.heads}")
    if header.top_k < min(args.top_k, draft.head.top_k):
        raise UserError(f"{args.trace}: ranks {header.top_k} candidates; give --top-k {header.top_k} or trace more")
    if len(trace.ranks) < MIN_POSITIONS:
        raise UserError(f"{args.trace}: {len(trace.ranks)} positions are too few to fit on; trace more texts")
    return trace


def _grow(trace: Trace, args: argparse.Namespace, head: Head) -> list[Topology]:
    """Trees of equal width for the calmer and the less sure half of the positions, and pooled ones.

    Where the text is predictable a deep tree keeps more than a bushy one of the same width, and elsewhere
    the other way round; that is what the entropy can choose between even where width is all that costs.
    """
    calm = trace.entropy_nats < np.median(trace.entropy_nats)
    halves = {"calm": calm, "unsure": ~calm}
    wanted = [(f"{name}{rows}", part, rows) for rows in args.rows for name, part in halves.items()]
    wanted += [(f"tree{rows}", np.ones_like(calm), rows) for rows in args.pooled_rows]
    grown: list[Topology] = []
    limits = {"max_depth": head.max_depth, "max_rank": min(args.top_k, head.top_k) - 1}
    for name, part, rows in wanted:
        topology = grow_where_steps_start(name, trace, part, rows - 1, **limits)
        if all(topology.rank_paths != other.rank_paths for other in grown):
            grown.append(topology)
    return grown


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
        expected = 1 + accepted_per_step(trace, topology)
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
    expected = {t.name: round(accepted_per_step(trace, t), 4) for t in bank.topologies}
    made_by = collect_provenance("scripts/calibrate.py", arguments) | {"traced_positions": len(trace.ranks)}
    return Bank(bank.name, bank.topologies, (calibration,), made_by=made_by, expected_accepted=expected)
