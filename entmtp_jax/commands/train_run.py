"""What ``train`` does once its flags are read: features, problem, training, files."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from entmtp_jax.backbone.transformer import build_backbone, output_matrix
from entmtp_jax.checkpoints import load_backbone
from entmtp_jax.checkpoints.fingerprint import fingerprint
from entmtp_jax.checkpoints.head_files import read_head, save_head
from entmtp_jax.commands.train_problems import PROBLEMS, Setting
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.hub import cache_folder, enable_compile_cache, resolve_model
from entmtp_jax.training.data import (
    Records,
    check_usable,
    check_vocabulary,
    concatenate,
    load_records,
    select,
    usable,
)
from entmtp_jax.training.draft_vocab import response_tokens
from entmtp_jax.training.examples import (
    DraftVocab,
    choose_draft_vocab,
    held_out_records,
    records_digest,
    take_draft_vocab,
)
from entmtp_jax.training.features import backbone_pace, extract_features, load_features
from entmtp_jax.training.head_run import Constants, Problem, Recipe, Trained, train_heads
from entmtp_jax.training.json_lines import read_json_lines
from entmtp_jax.training.loop import LoopConfig
from entmtp_jax.training.provenance import collect_provenance
from entmtp_jax.training.settings import LOG_FILE, RUN_FILE, Subject, check_subject
from entmtp_jax.training.throughput import measure_throughput
from entmtp_jax.training.warm_start import start_from
from entmtp_jax.types import Params

FEATURE_SEED = 0  # of the order of the blocks; apart from --seed, so that runs share the features


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Stores the features, trains, writes the heads and prints how good they are."""
    if not 0 <= args.teacher <= 1:
        raise UserError(f"--teacher {args.teacher}: a share lies between 0 and 1")
    cache = cache_folder(args.cache_dir)
    enable_compile_cache(cache)
    source = resolve_model(args.model, cache, lambda line: tqdm.write(line, file=sys.stderr))
    name = Path(args.model).name if Path(args.model).exists() else args.model
    subject = Subject(args.heads, name, fingerprint(source))
    check_subject(args.out / RUN_FILE, subject)
    parts = load_data(args)
    setting = prepare(args, source, subject, parts)
    problem = PROBLEMS[args.heads](args, setting)
    if args.start is not None:
        problem = start_from(problem, args.start, setting.config, setting.vocab.ids)
    recipe = plan(args, problem)
    trained = train(args, problem, recipe, setting, subject)
    result = {"steps": recipe.loop.steps, "held_out": trained.held_out._asdict()}
    data = {"sources": {name: part.num_records for name, part in parts.items()}}
    facts = {"seed": args.seed, **describe_data(args, problem, recipe, setting, data), "result": result}
    save(args, subject, setting, problem, trained, collect_provenance("scripts/train.py", arguments) | facts)
    print(json.dumps(result))
    return 0


def load_data(args: argparse.Namespace) -> dict[str, Records]:
    """Records by the path that was given for them.

    Raises:
      UserError: there is no token to draft in any of them.
    """
    parts = {str(path): load_records(path) for path in args.data}
    if not any(usable(part).any() for part in parts.values()):
        count = sum(part.num_records for part in parts.values())
        raise UserError(
            f"{', '.join(parts)}: none of the {count} records has a token to draft, for which a response needs two "
            "tokens; write others with scripts/distill.py"
        )
    return parts


def prepare(args: argparse.Namespace, source: Path, subject: Subject, parts: dict[str, Records]) -> Setting:
    """Runs the backbone over the data as far as that is still to be done, chooses the draft vocabulary."""
    records = concatenate(list(parts.values()))
    held = held_out_records(records)
    check_usable(records, held)
    config, params = load_backbone(source, "float32")
    for path, part in parts.items():
        check_vocabulary(part, config.vocab_size, where=path, model=subject.backbone)
    params = jax.tree.map(jnp.asarray, params)
    mark = f"{subject.fingerprint}-{records_digest(records)}"
    vocab = choose_vocab(args, config, records, held)
    print(json.dumps({"draft_vocab_size": len(vocab.ids), "coverage_by_size": coverage_by_size(vocab)}), flush=True)
    folder = features_folder(args)
    store_features(config, params, records, folder, mark, args.feature_blocks)
    features = load_features(folder, args.feature_blocks)
    check_usable(records, held, np.unique(features.record))
    rows = jnp.take(output_matrix(params), vocab.ids, axis=0)
    constants = Constants(rows, params["embed"]["embedding"])
    return Setting(config, constants, records, held, vocab, features, f"{mark}-{len(features.record)}")


def choose_vocab(args: argparse.Namespace, config: BackboneConfig, records: Records, held: np.ndarray) -> DraftVocab:
    """The scored ids: those of other heads, or as many of the most frequent ones as the flags ask for."""
    size = args.draft_vocab
    if isinstance(size, Path):
        ids = read_head(size, config).draft_ids
        if ids is not None:
            return take_draft_vocab(records, held, ids)
        size = 0
    return choose_draft_vocab(
        records,
        held,
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        size=size,
        coverage=None if size is not None else args.draft_coverage,
    )


def features_folder(args: argparse.Namespace) -> Path:
    """Where the hidden states are."""
    return args.features or args.out / "features"


def store_features(
    config: BackboneConfig, params: Params, records: Records, folder: Path, mark: str, max_blocks: int | None
) -> None:
    """Hidden states on disk, with a progress bar."""
    megabytes = len(records.tokens) * config.hidden_size * 2 / 1e6
    tqdm.write(f"hidden states of all records take {megabytes:.0f} MB in {folder}", file=sys.stderr)
    with tqdm(desc="features", unit="block", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        extract_features(
            build_backbone(config),
            params,
            records,
            folder,
            seed=FEATURE_SEED,
            fingerprint=mark,
            progress=progress,
            max_blocks=max_blocks,
        )


def coverage_by_size(vocab: DraftVocab) -> dict[str, float]:
    """Share of the held-out response tokens that draft vocabularies of some sizes hold."""
    return {str(size): round(share, 4) for size, share in vocab.sweep}


DEFAULT_BATCH = {"medusa": 2048}
DEFAULT_ROWS = 8


def plan(args: argparse.Namespace, problem: Problem) -> Recipe:
    """How the command line wants to train."""
    batch = args.batch if args.batch is not None else DEFAULT_BATCH.get(args.heads, DEFAULT_ROWS)
    steps = args.steps
    if steps is None:
        steps = max(1, math.floor(args.epochs * problem.count / (batch * args.accumulate)))
    return Recipe(
        loop=LoopConfig(steps, args.log_every, args.eval_every, args.checkpoint_every),
        batch=batch,
        accumulate=args.accumulate,
        learning_rate=args.lr,
        weight_decay=args.weight_decay,
        sampled_rare=args.sampled_rare,
        seed=args.seed,
    )


def scored_share(setting: Setting) -> float:
    """Share of the held-out response tokens that the heads can propose at all."""
    tokens = response_tokens(select(setting.records, np.flatnonzero(setting.held)))
    return float(np.isin(tokens, setting.vocab.ids).mean())


def train(args: argparse.Namespace, problem: Problem, recipe: Recipe, setting: Setting, subject: Subject) -> Trained:
    """Trains with a progress bar on a terminal, and with JSON lines elsewhere."""
    with tqdm(desc=args.heads, unit="update", total=recipe.loop.steps, disable=None) as bar:

        def report(line: dict[str, Any]) -> None:
            bar.update(line["step"] - bar.n)
            if bar.disable:
                print(json.dumps(line), flush=True)
            elif "loss" in line:
                bar.set_postfix(loss=f"{line['loss']:.3f}")
            else:
                bar.write(json.dumps(line))

        where = {"folder": args.out, "subject": subject, "data": setting.mark}
        return train_heads(problem, recipe, setting.constants, **where, report=report)


def describe_data(
    args: argparse.Namespace, problem: Problem, recipe: Recipe, setting: Setting, data: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """What was learnt from, and how fast that went; ``data`` says what is known already."""
    learnt = ~setting.held[np.unique(setting.features.record)]
    positions = len(setting.features.record)
    throughput = measure_throughput(
        read_json_lines(args.out / LOG_FILE),
        positions=positions,
        backbone_pace=backbone_pace(features_folder(args)),
        per_update=recipe.batch * recipe.accumulate * problem.settings.get("row_length", 1),
    )
    described = {
        "all_records": setting.records.num_records,
        "records": int(learnt.sum()),
        "held_out_records": int((~learnt).sum()),
        "positions": positions,
        "examples": problem.count,
        "scored_share": round(scored_share(setting), 4),
        "mark": setting.mark,
    }
    return {"data": data | described, "throughput": throughput.describe()}


def save(
    args: argparse.Namespace,
    subject: Subject,
    setting: Setting,
    problem: Problem,
    trained: Trained,
    provenance: dict[str, Any],
) -> None:
    """Writes ``head/``: config, weights and provenance."""
    params = trained.params
    if setting.vocab.is_whole and "output" in params:
        params = params | {"output": params["output"][:, np.argsort(setting.vocab.ids)]}  # in the order of the ids
    save_head(
        args.out / "head",
        shape=problem.shape,
        backbone=setting.config,
        params=params,
        draft_ids=None if setting.vocab.is_whole else setting.vocab.ids,
        backbone_name=subject.backbone,
        backbone_fingerprint=subject.fingerprint,
        draft_vocab={"held_out_coverage_by_size": coverage_by_size(setting.vocab)},
        provenance=provenance,
    )
