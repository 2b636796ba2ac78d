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
from entmtp_jax.checkpoints.head_files import save_head
from entmtp_jax.commands.train_problems import PROBLEMS, Setting
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.hub import cache_folder, enable_compile_cache, resolve_model
from entmtp_jax.training.data import Records, concatenate, load_records
from entmtp_jax.training.examples import DraftVocab, choose_draft_vocab, held_out_records, records_digest
from entmtp_jax.training.features import extract_features, load_features
from entmtp_jax.training.head_run import Constants, Problem, Recipe, Trained, train_heads
from entmtp_jax.training.loop import LoopConfig
from entmtp_jax.training.provenance import collect_provenance
from entmtp_jax.types import Params

FEATURE_SEED = 0  # of the order of the blocks; apart from --seed, so that runs share the features


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Stores the features, trains, writes the heads and prints how good they are."""
    if not 0 <= args.teacher <= 1:
        raise UserError(f"--teacher {args.teacher}: a share lies between 0 and 1")
    cache = cache_folder(args.cache_dir)
    enable_compile_cache(cache)
    source = resolve_model(args.model, cache, lambda line: tqdm.write(line, file=sys.stderr))
    setting = prepare(args, source)
    problem = PROBLEMS[args.heads](args, setting)
    recipe = plan(args, problem)
    trained = train(args, problem, recipe, setting)
    result = {"steps": recipe.loop.steps, "held_out": trained.held_out._asdict()}
    save(args, arguments, source, setting, problem, trained, result)
    print(json.dumps(result))
    return 0


def prepare(args: argparse.Namespace, source: Path) -> Setting:
    """Loads the data, runs the backbone over it as far as that is still to be done, chooses the draft vocabulary."""
    records = concatenate([load_records(path) for path in args.data])
    held = held_out_records(records)
    config, params = load_backbone(source, "float32")
    params = jax.tree.map(jnp.asarray, params)
    mark = f"{fingerprint(source)}-{records_digest(records)}"
    vocab = choose_draft_vocab(
        records,
        held,
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        size=args.draft_vocab,
        coverage=None if args.draft_vocab is not None else args.draft_coverage,
    )
    print(json.dumps({"draft_vocab_size": len(vocab.ids), "coverage_by_size": coverage_by_size(vocab)}), flush=True)
    folder = args.features or args.out / "features"
    store_features(config, params, records, folder, mark, args.feature_blocks)
    features = load_features(folder, args.feature_blocks)
    rows = jnp.take(output_matrix(params), vocab.ids, axis=0)
    constants = Constants(rows, params["embed"]["embedding"])
    return Setting(config, constants, records, held, vocab, features, f"{mark}-{len(features.record)}")


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


def train(args: argparse.Namespace, problem: Problem, recipe: Recipe, setting: Setting) -> Trained:
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

        return train_heads(problem, recipe, setting.constants, folder=args.out, data=setting.mark, report=report)


def save(
    args: argparse.Namespace,
    arguments: Sequence[str],
    source: Path,
    setting: Setting,
    problem: Problem,
    trained: Trained,
    result: dict[str, Any],
) -> None:
    """Writes ``head/``: config, weights and provenance."""
    trained_records = ~setting.held[np.unique(setting.features.record)]
    described = {
        "records": int(trained_records.sum()),
        "held_out_records": int((~trained_records).sum()),
        "examples": problem.count,
        "mark": setting.mark,
    }
    params = trained.params
    if setting.vocab.is_whole and "output" in params:
        params = params | {"output": params["output"][:, np.argsort(setting.vocab.ids)]}  # in the order of the ids
    provenance = collect_provenance("scripts/train.py", arguments)
    save_head(
        args.out / "head",
        shape=problem.shape,
        backbone=setting.config,
        params=params,
        draft_ids=None if setting.vocab.is_whole else setting.vocab.ids,
        backbone_name=Path(args.model).name if Path(args.model).exists() else args.model,
        backbone_fingerprint=fingerprint(source),
        draft_vocab={"held_out_coverage_by_size": coverage_by_size(setting.vocab)},
        provenance=provenance | {"seed": args.seed, "data": described, "result": result},
    )
