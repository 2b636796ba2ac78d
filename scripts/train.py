"""Trains Medusa heads for a frozen backbone on the backbone's own answers.

    python scripts/distill.py --prompts prompts.jsonl --out runs/answers
    python scripts/train.py --data runs/answers --out runs/medusa --epochs 4

The backbone runs once over the data and its hidden states stay on disk (--features); then only the heads
are trained. Killed at any moment and started again with the same command, it goes on and ends with the
same heads. The run's folder gets log.jsonl, the checkpoints and, at the end, head/ (config.json,
heads.safetensors, provenance.json), which scripts/decode.py takes as --heads. Without a terminal every
log line is also printed as JSON.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from entmtp_jax.backbone.transformer import build_backbone, output_matrix
from entmtp_jax.checkpoints import load_backbone
from entmtp_jax.checkpoints.head_files import save_head
from entmtp_jax.cli import run_main
from entmtp_jax.config import BackboneConfig
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.hub import DEFAULT_MODEL, cache_folder, enable_compile_cache, fingerprint, resolve_model
from entmtp_jax.training.data import Records, concatenate, load_records
from entmtp_jax.training.examples import (
    DraftVocab,
    Examples,
    choose_draft_vocab,
    held_out_records,
    make_examples,
    records_digest,
)
from entmtp_jax.training.features import extract_features, load_features
from entmtp_jax.training.loop import LoopConfig
from entmtp_jax.training.medusa_run import MedusaTraining, TrainedMedusa, token_order, train_medusa
from entmtp_jax.training.provenance import collect_provenance
from entmtp_jax.types import Array

FEATURE_SEED = 0  # of the order of the blocks; apart from --seed, so that runs share the features


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="known name, hub id, Hugging Face folder or .gguf file (%(default)s)")
    add("--data", type=Path, nargs="+", required=True, help="record files or folders of shards, from distill.py")
    add("--out", type=Path, required=True, help="folder of this run")
    add("--features", type=Path, help="folder of the stored hidden states (OUT/features); may serve several runs")
    add("--feature-blocks", type=int, metavar="N", help="use only N blocks, a random part of the data (all)")
    add("--cache-dir", help="folder of the fetched model and the compiled programs")
    add("--num-heads", type=int, default=4, metavar="K", help="tokens that are guessed ahead (%(default)s)")
    add("--num-layers", type=int, default=1, help="residual blocks per head (%(default)s)")
    add("--own-output", action="store_true", help="give each head an output matrix of its own")
    vocab = parser.add_mutually_exclusive_group()
    vocab.add_argument("--draft-vocab", type=int, metavar="N", help="ids that the heads score; 0 for all")
    share = "or: as many ids as cover this share of the held-out tokens (%(default)s)"
    vocab.add_argument("--draft-coverage", type=float, metavar="SHARE", default=0.95, help=share)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="updates")
    length.add_argument("--epochs", type=float, default=4.0, help="or: passes over the data (%(default)s)")
    add("--batch", type=int, default=2048, help="positions per update (%(default)s)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (%(default)s)")
    add("--weight-decay", type=float, default=0.0, help="of AdamW (%(default)s)")
    rare = "estimate the softmax from the 1,024 most frequent ids and M others per update; 0: full (%(default)s)"
    add("--sampled-rare", type=int, default=0, metavar="M", help=rare)
    add("--seed", type=int, default=0, help="of the order of the positions (%(default)s)")
    add("--log-every", type=int, default=10, help="updates between log lines (%(default)s)")
    add("--eval-every", type=int, default=200, help="updates between held-out evaluations; 0: at the end only")
    add("--checkpoint-every", type=int, default=50, help="updates between checkpoints (%(default)s)")
    return parser


def store_features(args: argparse.Namespace, source: Path, records: Records) -> tuple[BackboneConfig, Array, str]:
    """Runs the backbone over the data, as far as that is still to be done.

    Returns:
      Its config, its output matrix, and a mark of weights and records.
    """
    config, params = load_backbone(source, "float32")
    params = jax.tree.map(jnp.asarray, params)
    mark = f"{fingerprint(source)}-{records_digest(records)}"
    with tqdm(desc="features", unit="block", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        extract_features(
            build_backbone(config),
            params,
            records,
            features_folder(args),
            seed=FEATURE_SEED,
            fingerprint=mark,
            progress=progress,
            max_blocks=args.feature_blocks,
        )
    return config, output_matrix(params), mark


def features_folder(args: argparse.Namespace) -> Path:
    """Where the hidden states are stored."""
    return args.features or args.out / "features"


def plan_training(args: argparse.Namespace, config: BackboneConfig, vocab: DraftVocab, count: int) -> MedusaTraining:
    """The run that the command line asks for, on ``count`` training positions."""
    shape = MedusaConfig(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_heads=args.num_heads,
        num_layers=args.num_layers,
        draft_vocab_size=None if vocab.is_whole else len(vocab.ids),
        own_output=args.own_output,
    )
    steps = args.steps if args.steps is not None else max(1, round(args.epochs * count / args.batch))
    return MedusaTraining(
        shape=shape,
        loop=LoopConfig(steps, args.log_every, args.eval_every, args.checkpoint_every),
        batch=args.batch,
        learning_rate=args.lr,
        weight_decay=args.weight_decay,
        sampled_rare=args.sampled_rare,
        seed=args.seed,
    )


def run_training(
    args: argparse.Namespace, training: MedusaTraining, examples: Examples, rows: Array, data: str
) -> TrainedMedusa:
    """Trains with a progress bar on a terminal, and with JSON lines elsewhere."""
    with tqdm(desc="heads", unit="update", total=training.loop.steps, disable=None) as bar:

        def report(line: dict[str, Any]) -> None:
            bar.update(line["step"] - bar.n)
            if bar.disable:
                print(json.dumps(line), flush=True)
            elif "loss" in line:
                bar.set_postfix(loss=f"{line['loss']:.3f}")
            else:
                bar.write(json.dumps(line))

        return train_medusa(training, examples, rows, folder=args.out, data=data, report=report)


def train(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Stores the features, trains, writes the heads and prints how good they are."""
    cache = cache_folder(args.cache_dir)
    enable_compile_cache(cache)
    source = resolve_model(args.model, cache, lambda line: tqdm.write(line, file=sys.stderr))
    records = concatenate([load_records(path) for path in args.data])
    held = held_out_records(records)
    config, output, mark = store_features(args, source, records)
    coverage = None if args.draft_vocab is not None else args.draft_coverage
    vocab = choose_draft_vocab(
        records, held, vocab_size=config.vocab_size, eos_ids=config.eos_ids, size=args.draft_vocab, coverage=coverage
    )
    sweep = {str(size): round(share, 4) for size, share in vocab.sweep}
    print(json.dumps({"draft_vocab_size": len(vocab.ids), "coverage_by_size": sweep}), flush=True)

    features = load_features(features_folder(args), args.feature_blocks)
    examples = make_examples(features, records, held, vocab, num_heads=args.num_heads)
    training = plan_training(args, config, vocab, len(examples.train))
    data = f"{mark}-{len(examples.columns)}"
    trained = run_training(args, training, examples, jnp.take(output, vocab.ids, axis=0), data)

    result = {
        "steps": training.loop.steps,
        "held_out": trained.held_out._asdict(),
        "held_out_positions": len(examples.held_out),
        "held_out_targets_outside_draft_vocab": examples.held_out_misses(),
    }
    described = {"records": records.num_records, "train_positions": len(examples.train), "mark": data}
    save_head(
        args.out / "head",
        shape=training.shape,
        params=token_order(trained.params, vocab.ids) if vocab.is_whole else trained.params,
        draft_ids=None if vocab.is_whole else vocab.ids,
        backbone_name=Path(args.model).name if Path(args.model).exists() else args.model,
        backbone_fingerprint=fingerprint(source),
        draft_vocab={"held_out_coverage_by_size": sweep},
        provenance=collect_provenance("scripts/train.py", arguments)
        | {"seed": args.seed, "data": described, "result": result},
    )
    print(json.dumps(result))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(arguments)
    return run_main(lambda: train(args, arguments))


if __name__ == "__main__":
    sys.exit(main())
