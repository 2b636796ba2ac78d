r"""Grows a bank of topologies for trained heads, measures what they cost here, and fits its entropy thresholds.

    python scripts/calibrate.py --data runs/answers --features runs/medusa/features --heads runs/medusa/head \
        --out trees/smollm2-135m-instruct/medusa/general.json

Path counts and entropies come from the held-out records of the training run. The topologies grow greedily on
them, for calm and for unsure text apart; steps are timed on this device; and the thresholds are those with the
most expected tokens per second by replay. Topologies hold on any device; costs and thresholds are stored for
this one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.assemble import Draft, Model, load_draft, load_model
from entmtp_jax.bank import Bank, Calibration, save_bank
from entmtp_jax.calibration.fit import Ladder, fit_ladder
from entmtp_jax.calibration.replay import Trace, accepted_lengths, grow_topology
from entmtp_jax.checkpoints.head_files import read_head_info
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.device import device_name
from entmtp_jax.entropy import entropy_nats
from entmtp_jax.errors import UserError
from entmtp_jax.generation import compile_decoder
from entmtp_jax.heads.interface import Proposal
from entmtp_jax.hub import cache_folder, enable_compile_cache
from entmtp_jax.report.measure import Cost, step_costs
from entmtp_jax.scheduler import DEFAULT_WINDOW, Signal, fixed
from entmtp_jax.state import Request
from entmtp_jax.topology import Topology, autoregressive
from entmtp_jax.training.data import load_records
from entmtp_jax.training.examples import held_out_records
from entmtp_jax.training.features import draft_targets, load_features, response_positions
from entmtp_jax.training.provenance import collect_provenance
from entmtp_jax.types import Array, Float, Int, Params

POSITIONS_PER_PASS = 256
UNRANKED = 10_000  # stands for a token that is not among the candidates
COST_PROMPT = "Explain in a few sentences how a bicycle stays upright."
COST_REPEATS = 5


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="calibrate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="records that the heads were trained on; held-out ones are used")
    add("--features", type=Path, required=True, help="hidden states stored by train.py for these records")
    add("--heads", required=True, help="head folder, or a kind shipped for the model")
    add("--model", default="smollm2-135m-instruct", help="the backbone (%(default)s)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights (%(default)s)")
    add("--rows", type=int, nargs="+", default=[4, 8], help="for each, a tree for calm and one for unsure text")
    add("--pooled-rows", type=int, nargs="*", default=[32], help="for each, one tree for all text (%(default)s)")
    add("--top-k", type=int, default=10, help="ranks that a tree may use (%(default)s)")
    add("--capacity", type=int, default=512, help="cache slots while steps are timed (%(default)s)")
    add("--name", default="general", help="of the bank (%(default)s)")
    add("--out", type=Path, required=True, metavar="FILE.json", help="where the bank goes")
    add("--cache-dir", metavar="D", help="folder of the fetched model and the compiled programs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Traces, grows, measures, fits, saves."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(arguments)
    if min([*args.rows, *args.pooled_rows]) < 2:
        raise UserError(f"a tree has at least 2 rows; got {min([*args.rows, *args.pooled_rows])}")
    cache = cache_folder(args.cache_dir)
    enable_compile_cache(cache)
    model = load_model(args.model, dtype=args.dtype, cache=cache, notify=_say)
    depth = read_head_info(Path(args.heads)).shape.num_heads
    wide = Topology.from_paths("ranks", [(rank,) for rank in range(args.top_k)])
    draft = load_draft(model, args.heads, Bank("ranks", (wide,)), notify=_say)
    trace = _trace(model, draft, _held_out(args, depth), depth)
    topologies = _grow(trace, args, depth)
    bank = Bank(args.name, (autoregressive(), *topologies))
    costs = _costs(model, draft, bank, args)
    ladder = fit_ladder(trace, bank, {n: c.median_ms for n, c in costs.items()}, decay=1 - 1 / DEFAULT_WINDOW)
    _report(bank, trace, costs, ladder)
    save_bank(_finished(bank, trace, costs, ladder, args, arguments), args.out)
    _say(f"wrote {args.out}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Texts(NamedTuple):
    """Held-out positions: ``hidden [n, D]``, ``targets [n, K]`` and ``record [n]``."""

    hidden: Float[np.ndarray, "n D"]
    targets: Int[np.ndarray, "n K"]
    record: Int[np.ndarray, " n"]


def _held_out(args: argparse.Namespace, depth: int) -> _Texts:
    records = load_records(args.data)
    features = load_features(args.features)
    chosen = response_positions(features, records)
    chosen = chosen[held_out_records(records)[features.record[chosen]]]
    if not len(chosen):
        raise UserError(f"{args.features}: no held-out record among these features; store more blocks")
    targets = draft_targets(features, records, chosen, depth)
    return _Texts(features.hidden[chosen], targets, features.record[chosen])


def _trace(model: Model, draft: Draft, texts: _Texts, depth: int) -> Trace:
    """Ranks of the true tokens among the head's candidates, and entropies, position by position."""

    @jax.jit
    def one_pass(
        params: Params, head: Params, hidden: Float[Array, "n D"], targets: Int[Array, "n K"]
    ) -> tuple[Int[Array, "n K"], Float[Array, " n"]]:
        entropies = entropy_nats(model.backbone.unembed(params, hidden))
        state = draft.head.init_state(hidden.shape[0], 1)._replace(normed=hidden)
        proposal: Proposal = draft.head.propose(head, model.shared, state, targets[:, 0], depth)
        tokens, _ = proposal.parts
        hit = tokens == targets[:, :depth, None]
        return jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), UNRANKED), entropies

    ranks, entropies = [], []
    for start in range(0, len(texts.hidden), POSITIONS_PER_PASS):
        part = slice(start, start + POSITIONS_PER_PASS)
        count = len(texts.hidden[part])
        hidden = np.zeros((POSITIONS_PER_PASS, texts.hidden.shape[1]), np.float32)
        targets = np.full((POSITIONS_PER_PASS, texts.targets.shape[1]), -1, np.int32)
        hidden[:count], targets[:count] = texts.hidden[part], texts.targets[part]
        rank, entropy = one_pass(model.params, draft.params, jnp.asarray(hidden), jnp.asarray(targets))
        ranks.append(np.asarray(rank)[:count])
        entropies.append(np.asarray(entropy)[:count])
    return Trace(np.concatenate(ranks), np.concatenate(entropies), texts.record)


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
    _say(f"compiled {len(bank.topologies)} topologies in {seconds:.1f} s; timing their steps")
    request = Request(model.text.chat(COST_PROMPT, None), 1)
    return step_costs(compiled, params, [request], repeats=COST_REPEATS)


def _report(bank: Bank, trace: Trace, costs: dict[str, Cost], ladder: Ladder) -> None:
    _say("| topology | rows | depth | expected tokens/step | ms/step | expected tokens/s |\n|---|--:|--:|--:|--:|--:|")
    for topology in bank.topologies:
        expected = 1 + accepted_lengths(trace, topology).mean()
        cost = costs[topology.name]
        _say(
            f"| {topology.name} | {topology.num_rows} | {topology.depth} | {expected:.3f} | {cost.median_ms:.1f} "
            f"({cost.low_ms:.1f} .. {cost.high_ms:.1f}) | {1e3 * expected / cost.median_ms:.1f} |"
        )
    edges = ", ".join(f"{edge:.3f}" for edge in ladder.edges_nats)
    _say(
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
