"""The trace command's other half: figures of a bank from a trace alone, and how fast policies are replayed."""

import argparse
import dataclasses
import json
import time
from typing import Any

import numpy as np

from entmtp_jax.assemble import make_policy
from entmtp_jax.bank import Bank, find_bank, load_bank
from entmtp_jax.calibration.figures import Figures, figures
from entmtp_jax.calibration.replay import Trace, replay
from entmtp_jax.calibration.trace_file import load_trace
from entmtp_jax.cli import notify
from entmtp_jax.errors import UserError
from entmtp_jax.scheduler import Policy, fixed, hysteresis
from entmtp_jax.topology import check_fits


def run(args: argparse.Namespace) -> int:
    """Replays every topology of the bank alone, the bank's own policy, and policies for the clock."""
    file = load_trace(args.replay)
    bank = load_bank(find_bank(args.bank))
    if len(file.trace.ranks) == 0:
        raise UserError(f"{args.replay}: no text is longer than one token, so there is nothing to replay")
    for topology in bank.topologies:
        check_fits(topology, num_heads=file.header.depth, top_k=file.header.top_k, capacity=topology.num_rows)
    count = len(bank.topologies)
    policies = {topology.name: fixed(index, num_topologies=count) for index, topology in enumerate(bank.topologies)}
    if bank.calibrations:
        policies["policy"] = make_policy("entropy", bank, dtype=file.header.dtype, batch=1, notify=notify)
    found = replay(file.trace, bank.topologies, list(policies.values()))
    document: dict[str, Any] = {"trace": dataclasses.asdict(file.header), "bank": bank.name, "sets": {}}
    for name in dict.fromkeys(file.sets):
        texts = np.asarray(file.sets) == name
        rows = dict(zip(policies, figures(file.trace, found, texts), strict=True))
        _print_table(name, int(texts.sum()), rows)
        document["sets"][name] = {policy: dataclasses.asdict(row) for policy, row in rows.items()}
    if args.time_policies > 0:
        document["timing"] = _time(file.trace, bank, args.time_policies)
    print(json.dumps(document))
    return 0


def _print_table(name: str, texts: int, rows: dict[str, Figures]) -> None:
    notify(f"\n{name}: {texts} texts\n| topology | tokens/step | outside loops | kept drafts/step | outside loops |")
    notify("|---|--:|--:|--:|--:|")
    for policy, row in rows.items():
        notify(
            f"| {policy} | {row.tokens_per_step:.3f} | {row.tokens_per_step_outside_loops:.3f} "
            f"| {row.accepted_per_step:.3f} | {row.accepted_per_step_outside_loops:.3f} |"
        )


def draw_policies(trace: Trace, bank: Bank, count: int) -> list[Policy]:
    """Random tables of hysteresis form over three bins, with edges at random quantiles of the entropies."""
    rng = np.random.default_rng(0)
    size = len(bank.topologies)
    return [
        hysteresis(
            rng.integers(0, size, (size, 3)).tolist(), sorted(np.quantile(trace.entropy_nats, rng.random(2)).tolist())
        )
        for _ in range(count)
    ]


def _time(trace: Trace, bank: Bank, count: int) -> dict[str, float]:
    policies = draw_policies(trace, bank, count)
    began, processor_began = time.perf_counter(), time.process_time()
    replay(trace, bank.topologies, policies)
    seconds, processor_s = time.perf_counter() - began, time.process_time() - processor_began
    per_minute = 60 * count / seconds
    notify(
        f"\n{count} drawn policies over {len(trace.ranks)} positions and {len(bank.topologies)} topologies in "
        f"{seconds:.2f} s, {processor_s:.2f} s of them on the processor: {per_minute:,.0f} a minute"
    )
    return {"policies": count, "seconds": seconds, "processor_s": processor_s, "policies_per_minute": per_minute}
