"""The compare command's work: tokens per step by replay, cost of drafting on this device, tables."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from entmtp_jax.assemble import Model, load_draft, load_model
from entmtp_jax.bank import Bank, bank_of, find_bank, load_bank
from entmtp_jax.calibration.figures import Figures, figures
from entmtp_jax.calibration.replay import Trace, replay, select_texts
from entmtp_jax.calibration.trace_file import TraceFile, load_trace
from entmtp_jax.cli import notify
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.device import device_name
from entmtp_jax.errors import UserError
from entmtp_jax.hub import cache_folder, enable_compile_cache
from entmtp_jax.json_files import write_json
from entmtp_jax.report.draft_cost import DraftCost, draft_cost
from entmtp_jax.report.measure import COST_PROMPT
from entmtp_jax.scheduler import fixed
from entmtp_jax.state import Request
from entmtp_jax.topology import Topology


class Traced(NamedTuple):
    """One head's trace and the topologies that it can draft."""

    name: str
    file: TraceFile
    topologies: tuple[Topology, ...]


def run(args: argparse.Namespace) -> int:
    """Compares; returns the exit code."""
    bank = load_bank(find_bank(args.bank))
    heads = [_read(path, bank) for path in args.traces]
    sets = _common_sets(heads, args.traces)
    document: dict[str, Any] = {"bank": bank.name, "heads": {}}
    for head in heads:
        document["heads"][head.name] = dataclasses.asdict(head.file.header) | {
            "accuracy": {name: accuracy_by_depth(select_texts(head.file.trace, texts)) for name, texts in sets.items()},
            "replay": {name: _figures(head, texts) for name, texts in sets.items()},
        }
    _print_steps(document["heads"], bank, list(sets))
    _print_accuracy(document["heads"], list(sets))
    if not args.no_costs:
        topology = bank.topologies[bank.index(args.cost_topology)]
        enable_compile_cache(cache := cache_folder(args.cache_dir))
        costs = _costs(heads, topology, cache)
        _print_costs(costs, topology)
        document["costs"] = {name: cost._asdict() | {"share": cost.share} for name, cost in costs.items()}
        document["device"] = device_name()
    if args.json is not None:
        write_json(args.json, document)
    print(json.dumps(document))
    return 0


def accuracy_by_depth(trace: Trace) -> list[float]:
    """Share of the positions at which the first candidate of each depth, below the true path, is the true token.

    Near the end of a text there is no true token left; there every depth counts as wrong.
    """
    return [float(share) for share in (trace.ranks == 0).mean(axis=0)] if len(trace.ranks) else []


def _read(path: Path, bank: Bank) -> Traced:
    file = load_trace(path)
    fitting = [t for t in bank.topologies if t.depth <= file.header.depth and t.max_rank < file.header.top_k]
    if not fitting:
        raise UserError(f"{path}: no topology of bank {bank.name!r} fits its depth {file.header.depth}; give --bank")
    return Traced(Path(file.header.heads).name, file, tuple(fitting))


def _common_sets(heads: Sequence[Traced], paths: Sequence[Path]) -> dict[str, np.ndarray]:
    """Marks the texts of every set; all traces must hold the same texts."""
    first = heads[0].file
    for head, path in zip(heads, paths, strict=True):
        if [head.name for head in heads].count(head.name) > 1:
            raise UserError(f"{path}: two traces are of heads named {head.name!r}; rename a folder")
        same = (head.file.sets, head.file.ids) == (first.sets, first.ids)
        if not same or not np.array_equal(head.file.trace.new_tokens, first.trace.new_tokens):
            raise UserError(f"{path}: holds other texts than {paths[0]}; trace all heads on the same sets")
    return {name: np.asarray(first.sets) == name for name in dict.fromkeys(first.sets)}


def _figures(head: Traced, texts: np.ndarray) -> dict[str, dict[str, Any]]:
    policies = [fixed(index, num_topologies=len(head.topologies)) for index in range(len(head.topologies))]
    found: list[Figures] = figures(head.file.trace, replay(head.file.trace, head.topologies, policies), texts)
    return {t.name: dataclasses.asdict(row) for t, row in zip(head.topologies, found, strict=True)}


def _print_steps(heads: dict[str, Any], bank: Bank, sets: list[str]) -> None:
    print("| heads | topology | " + " | ".join(sets) + " |\n|---|---|" + "--:|" * len(sets))
    for name, head in heads.items():
        for topology in bank.topologies:
            rows = [head["replay"][one].get(topology.name) for one in sets]
            if None not in rows:
                cells = [f"{r['tokens_per_step']:.2f} ({r['tokens_per_step_outside_loops']:.2f})" for r in rows]
                print(f"| {name} | {topology.name} | " + " | ".join(cells) + " |")
    print("\nTokens per step; in brackets outside repetition loops.\n")


def _print_accuracy(heads: dict[str, Any], sets: list[str]) -> None:
    print("| heads | " + " | ".join(sets) + " |\n|---|" + "---|" * len(sets))
    for name, head in heads.items():
        cells = [" / ".join(f"{100 * share:.1f}" for share in head["accuracy"][one]) for one in sets]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\nTrue token is the first candidate, in percent by depth, along the true path.\n")


def _costs(heads: Sequence[Traced], topology: Topology, cache: Path) -> dict[str, DraftCost]:
    first = heads[0].file.header
    model = load_model(first.model, dtype=first.dtype, cache=cache, notify=notify)
    return {head.name: _cost(model, head, topology) for head in heads if topology in head.topologies}


def _cost(model: Model, head: Traced, topology: Topology) -> DraftCost:
    draft = load_draft(model, head.file.header.heads, bank_of(topology), notify=notify)
    decoder = build_decoder(model.backbone, draft.head, draft.bank, DecodeConfig(capacity=512))
    params = ModelParams(model.params, draft.params)
    policy = fixed(0, num_topologies=len(draft.bank.topologies))
    state = decoder.prefill(params, decoder.start([Request(model.text.chat(COST_PROMPT), 64)]), policy)
    return draft_cost(model.backbone, draft.head, params, jax.block_until_ready(state), topology)


def _print_costs(costs: dict[str, DraftCost], topology: Topology) -> None:
    print(
        f"{topology.name} ({topology.num_rows} rows) on {device_name()}, milliseconds (quartiles):\n\n"
        "| heads | draft | take in | verify | share |\n|---|--:|--:|--:|--:|"
    )
    for name, cost in costs.items():
        cells = [f"{mid:.2f} ({low:.2f} .. {high:.2f})" for low, mid, high in (cost.draft, cost.advance, cost.verify)]
        print(f"| {name} | " + " | ".join(cells) + f" | {100 * cost.share:.0f} % |")
    print()
