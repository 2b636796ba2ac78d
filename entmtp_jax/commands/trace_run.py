"""The trace command's work: prompts answered plainly, the answers read once more, the head run along them."""

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from entmtp_jax.assemble import Draft, Model, load_draft, load_model
from entmtp_jax.bank import Bank, bank_of
from entmtp_jax.calibration.known_texts import read_texts
from entmtp_jax.calibration.trace import KnownText, trace_texts
from entmtp_jax.calibration.trace_file import TraceFile, TraceHeader, fingerprint_params, save_trace
from entmtp_jax.cli import notify
from entmtp_jax.commands.trace import trace_file
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.errors import UserError
from entmtp_jax.generation import Completion, generate
from entmtp_jax.heads.lookup import build_lookup
from entmtp_jax.hub import cache_folder, enable_compile_cache
from entmtp_jax.prompts import read_prompts
from entmtp_jax.scheduler import fixed
from entmtp_jax.state import Finish, Request
from entmtp_jax.topology import Topology, autoregressive
from entmtp_jax.training.data import Records, check_vocabulary, from_sequences, load_records, select
from entmtp_jax.training.examples import held_out_records
from entmtp_jax.training.provenance import collect_provenance

HELD_OUT = "held_out"  # name of the set that --data gives


class Asked(NamedTuple):
    """One prompt of a set."""

    set: str
    id: str
    request: Request


class Answers(NamedTuple):
    """Whole texts, and what they are."""

    records: Records
    sets: list[str]
    ids: list[str]
    finish_reasons: list[str]


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Answers, traces, saves; ``arguments`` are the same flags as words, for the trace's record."""
    cache = cache_folder(args.cache_dir)
    enable_compile_cache(cache)
    model = load_model(args.model, dtype=args.dtype, cache=cache, notify=notify)
    wide = Bank("ranks", (Topology.from_paths("ranks", [(rank,) for rank in range(args.top_k)]),))
    drafts = [load_draft(model, heads, wide, notify=notify) for heads in args.heads]
    answers = _held_out(args.data, model) if args.data is not None else _answers(args, model)
    texts = read_texts(model.backbone, model.params, answers.records, functools.partial(_progress, "read"))
    written = [_trace(args, arguments, model, draft, answers, texts) for draft in drafts]
    print(json.dumps({"traces": written}))
    return 0


def _trace(
    args: argparse.Namespace,
    arguments: Sequence[str],
    model: Model,
    draft: Draft,
    answers: Answers,
    texts: Sequence[KnownText],
) -> dict[str, Any]:
    """Traces one kind of heads, saves, and tells what was written."""
    file = trace_file(args.out, draft.name)
    unembed = functools.partial(model.backbone.unembed, model.params)
    trace = trace_texts(draft.head, draft.params, model.shared, unembed, texts, depth=draft.head.max_depth)
    header = _header(args, arguments, model, draft)
    save_trace(file, TraceFile(header, trace, answers.sets, answers.ids, answers.finish_reasons))
    differing = int((~trace.agrees).sum())
    notify(
        f"wrote {file}: {len(trace.new_tokens)} texts, {len(trace.ranks)} positions, {file.stat().st_size:,} "
        f"bytes; at {differing} of them the pass over the whole text chose another token than decoding did"
    )
    summary = {"file": str(file), "texts": len(trace.new_tokens), "positions": len(trace.ranks)}
    return summary | {"differing_choices": differing}


def _progress(what: str, done: int, total: int) -> None:
    notify(f"{what} {done} of {total} texts")


def _answers(args: argparse.Namespace, model: Model) -> Answers:
    asked = [prompt for entry in args.set for prompt in _read_set(entry, args, model)]
    requests = [prompt.request for prompt in asked]
    completions = answer_plainly(model, requests, batch=args.batch_size, capacity=args.capacity)
    for prompt, completion in zip(asked, completions, strict=True):
        if completion.finish_reason == Finish.NONFINITE.name.lower():
            raise UserError(f"{prompt.set}, {prompt.id}: the backbone's logits are not finite; is the model broken?")
    return Answers(
        records=from_sequences(
            [[*request.prompt, *done.tokens] for request, done in zip(requests, completions, strict=True)],
            [len(request.prompt) for request in requests],
        ),
        sets=[prompt.set for prompt in asked],
        ids=[prompt.id for prompt in asked],
        finish_reasons=[completion.finish_reason for completion in completions],
    )


def _read_set(entry: str, args: argparse.Namespace, model: Model) -> list[Asked]:
    """The prompts that ``bench.py`` would take, or those after them."""
    name, _, file = entry.partition("=")
    encoded = [(prompt.id, model.text.chat(prompt.prompt, None)) for prompt in read_prompts(Path(file))]
    fitting = [(name, ids) for name, ids in encoded if len(ids) + args.max_new_tokens <= args.capacity]
    chosen = fitting[args.skip : args.skip + args.prompts_per_set]
    if not chosen:
        what = f"{len(fitting)} of {len(encoded)} prompts fit {args.capacity} cache slots and {args.skip} are skipped"
        raise UserError(f"{file}: {what}, so none is left; raise --capacity or lower --skip")
    notify(f"{name}: {len(chosen)} prompts ({len(encoded) - len(fitting)} of the file too long)")
    return [Asked(name, id, Request(ids, args.max_new_tokens, model.config.eos_ids)) for id, ids in chosen]


def answer_plainly(model: Model, requests: Sequence[Request], *, batch: int, capacity: int) -> list[Completion]:
    """Plain decoding, prompts of similar length together; the answers in the order of the requests."""
    plain = bank_of(autoregressive())
    decoder = build_decoder(model.backbone, build_lookup(), plain, DecodeConfig(batch=batch, capacity=capacity))
    params, policy = ModelParams(model.params, {}), fixed(0, num_topologies=1)
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
    found: dict[int, Completion] = {}
    for start in range(0, len(order), batch):
        members = order[start : start + batch]
        done = generate(decoder, params, [requests[index] for index in members], policy)
        found |= zip(members, done.completions, strict=True)
        _progress("answered", len(found), len(order))
    return [found[index] for index in range(len(requests))]


def _held_out(data: Path, model: Model) -> Answers:
    records = load_records(data)
    check_vocabulary(records, model.config.vocab_size, where=str(data), model=model.name)
    chosen = np.flatnonzero(held_out_records(records))
    kept = select(records, chosen)
    ended = [int(kept.record(i)[-1]) in model.config.eos_ids for i in range(len(chosen))]
    return Answers(
        records=kept,
        sets=[HELD_OUT] * len(chosen),
        ids=[str(index) for index in chosen],
        finish_reasons=[Finish.EOS.name.lower() if end else Finish.LENGTH.name.lower() for end in ended],
    )


def _header(args: argparse.Namespace, arguments: Sequence[str], model: Model, draft: Draft) -> TraceHeader:
    return TraceHeader(
        model=model.name,
        backbone_fingerprint=model.fingerprint,
        heads=draft.name,
        head_kind=draft.head.name,
        head_fingerprint=fingerprint_params(draft.params),
        dtype=model.dtype,
        depth=draft.head.max_depth,
        top_k=draft.head.top_k,
        made_by=collect_provenance("scripts/trace.py", arguments),
    )
