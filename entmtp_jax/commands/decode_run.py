"""The decode command's work: assemble, decode batch by batch, print, compare, write the JSON file."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from entmtp_jax.assemble import Draft, Model, load_draft, load_model, make_policy
from entmtp_jax.bank import Bank
from entmtp_jax.cli import notify
from entmtp_jax.commands.decode import CAPACITY_STEP
from entmtp_jax.decode import DecodeConfig, Decoder, ModelParams, build_decoder
from entmtp_jax.device import device_name
from entmtp_jax.errors import UserError
from entmtp_jax.generation import Completion, Generation, compile_decoder, generate, stream
from entmtp_jax.hub import cache_folder, enable_compile_cache
from entmtp_jax.json_files import write_json
from entmtp_jax.prompts import Prompt
from entmtp_jax.report.parity import Parity, compare, margin_function
from entmtp_jax.report.stats import Stats, acceptance_by_depth, completion_stats
from entmtp_jax.scheduler import Policy, fixed, reachable, renumber
from entmtp_jax.state import Request
from entmtp_jax.text import StreamDecoder, Text

STEP_COLORS = ("\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m")
RESET = "\x1b[0m"


class Result(NamedTuple):
    """What became of one prompt."""

    prompt: Prompt
    completion: Completion
    stats: Stats
    parity: Parity | None


class Setup(NamedTuple):
    """Everything that stays the same from batch to batch."""

    arguments: argparse.Namespace
    model: Model
    draft: Draft
    decoder: Decoder
    params: ModelParams
    policy: Policy
    compile_s: float


def run(arguments: argparse.Namespace, prompts: list[Prompt]) -> int:
    """Decodes all prompts; see ``commands.decode`` for the flags."""
    cache = cache_folder(arguments.cache_dir)
    enable_compile_cache(cache)
    model = load_model(arguments.model, dtype=arguments.dtype, cache=cache, notify=notify)
    requests = [Request(_encode(arguments, model, p), arguments.max_new_tokens, model.config.eos_ids) for p in prompts]
    setup = _set_up(arguments, model, requests)
    results = []
    for start in range(0, len(prompts), arguments.batch_size):
        chosen = slice(start, start + arguments.batch_size)
        results += _decode_batch(setup, prompts[chosen], requests[chosen], show_names=len(prompts) > 1)
    if arguments.stats:
        _print_stats(setup, results, requests[0])
    if arguments.check_parity:
        _print_parity(results)
    if arguments.json is not None:
        write_json(arguments.json, _document(setup, results))
    return 0


def _encode(arguments: argparse.Namespace, model: Model, prompt: Prompt) -> list[int]:
    text = model.text
    ids = text.encode(prompt.prompt) if arguments.no_chat else text.chat(prompt.prompt, arguments.system)
    if ids:
        return ids
    # An empty prompt is a text that has just begun.
    return [] if model.config.bos_id is None else [model.config.bos_id]


def _set_up(arguments: argparse.Namespace, model: Model, requests: Sequence[Request]) -> Setup:
    draft = load_draft(model, arguments.heads, arguments.bank, notify=notify)
    policy = make_policy(arguments.policy, draft.bank, dtype=arguments.dtype, batch=arguments.batch_size, notify=notify)
    # What the policy cannot choose need not be compiled; plain decoding is what texts and steps are compared with.
    kept = sorted({*reachable(policy), draft.bank.index("ar")})
    draft, policy = draft._replace(bank=draft.bank.select(kept)), renumber(policy, kept)
    capacity = arguments.capacity or _capacity(model, requests)
    config = DecodeConfig(batch=arguments.batch_size, capacity=capacity)
    decoder = build_decoder(model.backbone, draft.head, draft.bank, config)
    params = ModelParams(model.params, draft.params)
    for request in requests:
        decoder.start([request] + [None] * (config.batch - 1))  # refuses what does not fit before anything compiles
    compiled, seconds = compile_decoder(decoder, params, policy)
    return Setup(arguments, model, draft, compiled, params, policy, seconds)


def _capacity(model: Model, requests: Sequence[Request]) -> int:
    needed = max(len(request.prompt) + request.max_new_tokens for request in requests)
    longest = max(len(request.prompt) for request in requests)
    if longest > model.config.max_positions:
        raise UserError(
            f"a prompt has {longest} tokens, but {model.name} was made for {model.config.max_positions}; shorten it"
        )
    return min(-(-needed // CAPACITY_STEP) * CAPACITY_STEP, model.config.max_positions)


def _decode_batch(
    setup: Setup, prompts: Sequence[Prompt], requests: Sequence[Request], *, show_names: bool
) -> list[Result]:
    alone = len(prompts) == 1 and setup.arguments.stream
    if alone:
        if show_names:
            print(f"### {prompts[0].id}")
        generation = _stream_text(setup, requests[0])
    else:
        generation = generate(setup.decoder, setup.params, requests, setup.policy)
        for prompt, completion in zip(prompts, generation.completions, strict=True):
            if show_names:
                print(f"### {prompt.id}")
            print(setup.model.text.decode(completion.tokens), flush=True)
    parities = _check_parity(setup, requests, generation) if setup.arguments.check_parity else [None] * len(prompts)
    timing = {"prefill_s": generation.prefill_s, "decode_s": generation.decode_s}
    return [
        Result(prompt, completion, completion_stats(completion, setup.draft.bank, **timing), parity)
        for prompt, completion, parity in zip(prompts, generation.completions, parities, strict=True)
    ]


def _stream_text(setup: Setup, request: Request) -> Generation:
    """Prints one text while it is written; a step's tokens share a colour."""
    colored = setup.arguments.color and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    decoder, shade = StreamDecoder(setup.model.text), 0
    generation = None
    for chunk in stream(setup.decoder, setup.params, [request], setup.policy):
        tokens = chunk.tokens[0]
        for count in chunk.emitted[0]:
            piece, tokens = decoder.push(tokens[:count]), tokens[count:]
            shade = (shade + 1) % len(STEP_COLORS)
            print(f"{STEP_COLORS[shade]}{piece}{RESET}" if colored and piece else piece, end="", flush=True)
        generation = chunk.generation
    print(decoder.finish(), flush=True)
    assert generation is not None, "the last chunk holds the finished batch"
    return generation


def _plain_policy(bank: Bank) -> Policy:
    return fixed(bank.index("ar"), num_topologies=len(bank.topologies))


def _check_parity(setup: Setup, requests: Sequence[Request], generation: Generation) -> list[Parity]:
    plain = generate(setup.decoder, setup.params, requests, _plain_policy(setup.draft.bank))
    margin = margin_function(setup.model.backbone, setup.model.params)
    return [
        compare(request.prompt, ours.tokens, theirs.tokens, margin)
        for request, ours, theirs in zip(requests, generation.completions, plain.completions, strict=True)
    ]


def _print_parity(results: Sequence[Result]) -> None:
    for result in results:
        parity = result.parity
        assert parity is not None
        if parity.equal:
            notify(f"parity {result.prompt.id}: equal to plain decoding ({len(result.completion.tokens)} tokens)")
        else:
            notify(
                f"parity {result.prompt.id}: DIFFERS from plain decoding at new token {parity.first_difference} "
                f"(top-2 margin there {parity.margin:.2e})"
            )


def _print_stats(setup: Setup, results: Sequence[Result], request: Request) -> None:
    """Sums over all prompts; the plain step that break-even compares with is measured here and now."""
    completions = [result.completion for result in results]
    batches = {(r.stats["prefill_s"], r.stats["decode_s"]): max(c.steps for c in completions) for r in results}
    decode_s = sum(seconds for _, seconds in batches)
    tokens, steps = sum(len(c.tokens) for c in completions), sum(c.steps for c in completions)
    lines = [f"compiled in {setup.compile_s:.1f} s (arithmetic: {setup.model.dtype}, {setup.model.arithmetic})"]
    if steps:
        plain_ms = _plain_step_ms(setup, request)
        step_ms = 1e3 * decode_s / (steps / setup.arguments.batch_size)
        lines.append(
            f"{tokens} tokens in {steps} steps: {tokens / steps:.2f} tokens per step, break-even "
            f"{step_ms / plain_ms:.2f} ({step_ms:.1f} ms a step, plain {plain_ms:.1f} ms), "
            f"{tokens / decode_s:.1f} tokens/s"
        )
        used = np.bincount(
            np.concatenate([c.topologies for c in completions]), minlength=len(setup.draft.bank.topologies)
        )
        shares = zip(setup.draft.bank.topologies, used, strict=True)
        lines.append("steps by topology: " + ", ".join(f"{t.name} {n / steps:.0%}" for t, n in shares if n))
        by_depth = acceptance_by_depth(completions, setup.draft.bank)
        lines.append(
            "acceptance by depth: "
            + (", ".join(f"{k}/{n} ({k / n:.0%})" for k, n in by_depth if n) or "nothing drafted")
        )
    for line in lines:
        notify(line)


def _plain_step_ms(setup: Setup, request: Request, steps: int = 12) -> float:
    few = request._replace(max_new_tokens=steps, eos_ids=())
    plain = generate(setup.decoder, setup.params, [few], _plain_policy(setup.draft.bank))
    return 1e3 * plain.decode_s / max(plain.completions[0].steps, 1)


def _document(setup: Setup, results: Sequence[Result]) -> dict[str, Any]:
    text: Text = setup.model.text
    rows = []
    for result in results:
        completion = result.completion
        row: dict[str, Any] = {
            "id": result.prompt.id,
            "prompt": result.prompt.prompt,
            "text": text.decode(completion.tokens),
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
            "stats": result.stats,
        }
        if result.parity is not None:
            row["parity"] = result.parity._asdict()
        rows.append(row)
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(setup.arguments).items()}
    return {
        "results": rows,
        "compile_s": setup.compile_s,
        "config": options
        | {
            "heads": setup.draft.name,
            "bank": setup.draft.bank.name,
            "topologies": [topology.name for topology in setup.draft.bank.topologies],  # those that were compiled
            "capacity": setup.decoder.config.capacity,
            "arithmetic": setup.model.arithmetic,
            "device": device_name(),
            "fingerprint": setup.model.fingerprint,
        },
        "versions": {
            "entmtp_jax": metadata.version("entmtp_jax"),
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
    }
