"""The bench command's work: contestants, tables, and the document at the end."""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from entmtp_jax.assemble import Draft, Model, default_heads, load_draft, load_model, make_policy
from entmtp_jax.bank import Bank
from entmtp_jax.cli import notify
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.device import device_name
from entmtp_jax.generation import compile_decoder
from entmtp_jax.hub import cache_folder, enable_compile_cache
from entmtp_jax.json_files import write_json
from entmtp_jax.prompts import read_prompts
from entmtp_jax.report.measure import (
    COST_PROMPT,
    Contestant,
    Run,
    Summary,
    flips_function,
    interleave,
    step_costs,
    summarise,
)
from entmtp_jax.report.parity import EXCUSED_MARGIN, compare, margin_function
from entmtp_jax.scheduler import Policy
from entmtp_jax.state import Request
from entmtp_jax.topology import autoregressive


class PromptSet(NamedTuple):
    """Prompts of one name, as requests."""

    name: str
    requests: list[Request]
    left_out: int  # prompts too long for the cache


def run(arguments: argparse.Namespace) -> int:
    """Measures what the flags ask for."""
    cache = cache_folder(arguments.cache_dir)
    enable_compile_cache(cache)
    model = load_model(arguments.model, dtype=arguments.dtype, cache=cache, notify=notify)
    heads = arguments.heads or default_heads(model.name, notify)
    arguments = argparse.Namespace(**vars(arguments) | {"heads": heads})
    sets = [_read_set(entry, arguments, model) for entry in arguments.set]
    notify(
        f"{device_name()}; jax {jax.__version__}; {model.name} {model.dtype}, arithmetic {model.arithmetic}; "
        "temperature 0, chat template as the model has it"
    )
    if arguments.transformers:
        from entmtp_jax.commands.bench_peer import compare_with_transformers

        found: dict[str, Any] = {"transformers": compare_with_transformers(model, sets, cache, notify)}
    elif arguments.flips:
        found = {"flips": _count_flips(model, sets, arguments)}
    elif arguments.costs:
        found = {"step_ms": _measure_costs(model, arguments)}
    else:
        found = {"sets": _race(model, sets, arguments)}
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    versions = {name: metadata.version(name) for name in ("entmtp_jax", "jax", "flax", "numpy")}
    document = found | {
        "config": options,
        "device": device_name(),
        "arithmetic": model.arithmetic,
        "versions": versions,
    }
    if arguments.json is not None:
        write_json(arguments.json, document)
    print(json.dumps(document))
    return 0


def _read_set(entry: str, arguments: argparse.Namespace, model: Model) -> PromptSet:
    name, _, file = entry.partition("=")
    prompts = read_prompts(Path(file))
    encoded = [model.text.chat(prompt.prompt, None) for prompt in prompts]
    fitting = [ids for ids in encoded if len(ids) + arguments.max_new_tokens <= arguments.capacity]
    chosen = fitting[: arguments.prompts_per_set]
    return PromptSet(
        name=name,
        requests=[Request(ids, arguments.max_new_tokens, model.config.eos_ids) for ids in chosen],
        left_out=len(encoded) - len(fitting),
    )


def _contestant(
    name: str, model: Model, draft: Draft, bank: Bank, policy: Policy, arguments: argparse.Namespace
) -> Contestant:
    decoder = build_decoder(model.backbone, draft.head, bank, DecodeConfig(capacity=arguments.capacity))
    params = ModelParams(model.params, draft.params)
    compiled, seconds = compile_decoder(decoder, params, policy)
    notify(f"compiled {name} ({', '.join(t.name for t in bank.topologies)}) in {seconds:.1f} s")
    return Contestant(name, compiled, params, policy)


def _contestants(model: Model, arguments: argparse.Namespace) -> list[Contestant]:
    draft = load_draft(model, arguments.heads, arguments.bank, notify=notify)

    def policy(text: str, bank: Bank) -> Policy:
        return make_policy(text, bank, dtype=arguments.dtype, batch=1, notify=notify)

    plain = Bank("plain", (autoregressive(),))
    made = [_contestant("plain", model, draft, plain, policy("ar", plain), arguments)]
    for rows in arguments.row_limits:
        bank = draft.bank.restrict(rows)
        name = f"entropy, at most {rows} rows"
        made.append(_contestant(name, model, draft, bank, policy("entropy", bank), arguments))
    for name in arguments.fixed:
        one = Bank(name, (draft.bank.topologies[draft.bank.index(name)],))
        made.append(_contestant(f"fixed {name}", model, draft, one, policy(f"fixed:{name}", one), arguments))
    return made


def _race(model: Model, sets: Sequence[PromptSet], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    contestants = _contestants(model, arguments)
    for contestant in contestants:  # the first call of a compiled program is slower
        interleave([contestant], sets[0].requests[0]._replace(max_new_tokens=8), 1)
    margin = margin_function(model.backbone, model.params)
    found = []
    for prompts in sets:
        runs: dict[str, list[list[Run]]] = {contestant.name: [] for contestant in contestants}
        began = time.perf_counter()
        for request in prompts.requests:
            for name, done in interleave(contestants, request, arguments.repeats).items():
                runs[name].append(done)
        notify(
            f"\n{prompts.name}: {len(prompts.requests)} prompts in {time.perf_counter() - began:.0f} s "
            f"({prompts.left_out} of the file too long)"
        )
        plain = runs["plain"]
        summaries = {c.name: summarise(runs[c.name], plain, c.decoder.bank) for c in contestants}
        _print_table(summaries)
        excused, unexcused = _differences(prompts.requests, runs, plain, margin)
        notify(f"differences from plain decoding: {excused} at margins below {EXCUSED_MARGIN:g}, {unexcused} others")
        found.append(
            {
                "set": prompts.name,
                "prompts": len(prompts.requests),
                "summaries": {name: dataclasses.asdict(s) for name, s in summaries.items()},
                "excused_differences": excused,
                "unexcused_differences": unexcused,
            }
        )
    return found


def _differences(requests: Sequence[Request], runs: dict, plain: Sequence[list[Run]], margin: Any) -> tuple[int, int]:
    excused = unexcused = 0
    for done in runs.values():
        for request, ours, theirs in zip(requests, done, plain, strict=True):
            parity = compare(request.prompt, ours[0].completion.tokens, theirs[0].completion.tokens, margin)
            if not parity.equal:
                near = parity.margin is not None and parity.margin < EXCUSED_MARGIN
                excused, unexcused = excused + near, unexcused + (not near)
    return excused, unexcused


def _print_table(summaries: dict[str, Summary]) -> None:
    notify("| contestant | tokens/step | outside loops | speed-up (quartiles) | ms/step | tokens/s | topologies |")
    notify("|---|--:|--:|---|--:|--:|---|")
    for name, s in summaries.items():
        low, middle, high = s.speedup_quartiles
        shares = ", ".join(f"{topology} {share:.0%}" for topology, share in s.topology_shares.items())
        notify(
            f"| {name} | {s.tokens_per_step:.2f} | {s.tokens_per_step_outside_loops:.2f} | "
            f"{s.speedup:.2f} ({low:.2f} / {middle:.2f} / {high:.2f}) | {s.ms_per_step:.1f} | {s.tokens_per_s:.1f} "
            f"| {shares} |"
        )


def _measure_costs(model: Model, arguments: argparse.Namespace) -> dict[str, Any]:
    draft = load_draft(model, arguments.heads, arguments.bank, notify=notify)
    policy = make_policy("ar", draft.bank, dtype=arguments.dtype, batch=1, notify=notify)
    contestant = _contestant("costs", model, draft, draft.bank, policy, arguments)
    request = Request(model.text.chat(COST_PROMPT), 1)
    costs = step_costs(contestant.decoder, contestant.params, [request])
    notify("| topology | rows | ms per step (quartiles) |\n|---|--:|---|")
    for topology in draft.bank.topologies:
        cost = costs[topology.name]
        notify(
            f"| {topology.name} | {topology.num_rows} | {cost.median_ms:.1f} "
            f"({cost.low_ms:.1f} .. {cost.high_ms:.1f}) |"
        )
    return {name: cost._asdict() for name, cost in costs.items()}


def _count_flips(model: Model, sets: Sequence[PromptSet], arguments: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding's text fed back through passes of 8 rows: how often does the choice differ, and by how little?"""
    draft = load_draft(model, "lookup", None, notify=notify)
    plain = Bank("plain", (autoregressive(),))
    policy = make_policy("ar", plain, dtype=arguments.dtype, batch=1, notify=notify)
    contestant = _contestant("plain", model, draft, plain, policy, arguments)
    flips = flips_function(model.backbone, rows=8, slots=arguments.capacity + 8)
    positions, different, worst = 0, 0, 0.0
    for request in (request for prompts in sets for request in prompts.requests):
        done = interleave([contestant], request, 1)["plain"][0].completion
        found = flips(model.params, list(request.prompt), done.tokens)
        positions, different = positions + found.positions, different + found.flips
        worst = max(worst, found.worst_gap_ulps)
    notify(
        f"{different} of {positions} choices differ ({1e3 * different / positions:.2f} per 1,000 tokens), "
        f"largest top-2 gap among them {worst:.2f} bfloat16 ulps"
    )
    return {
        "positions": positions,
        "flips": different,
        "per_1000": 1e3 * different / positions,
        "worst_gap_ulps": worst,
    }
