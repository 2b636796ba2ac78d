"""Small training runs on the tiny model, over texts that can be learnt."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.transformer import output_matrix
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.testing.tiny import tiny_backbone
from entmtp_jax.training.data import Records, from_sequences, save_records
from entmtp_jax.training.examples import Examples, choose_draft_vocab, held_out_records, make_examples
from entmtp_jax.training.features import Features, extract_features, load_features
from entmtp_jax.training.head_run import Constants, Recipe, Trained, train_heads
from entmtp_jax.training.loop import LoopConfig, Report
from entmtp_jax.training.losses import DraftLoss, depth_weights
from entmtp_jax.training.medusa import medusa_problem
from entmtp_jax.training.settings import Subject

CYCLE = [11, 3, 42, 7, 25, 58, 19, 33, 50]  # every token tells the next ones, so heads can be always right
HEADS = 3
TIMES = ("steps_per_s", "seconds")
SUBJECT = Subject("medusa", "tiny", "0123456789abcdef")
Stored = tuple[Records, Features]


def cyclic_records(count: int = 80, seed: int = 0) -> Records:
    """Texts that walk round the cycle; prompts of 1 to 3 tokens, answers of 5 to 12."""
    rng = np.random.default_rng(seed)
    texts, prompts = [], []
    for _ in range(count):
        start, length = int(rng.integers(len(CYCLE))), int(rng.integers(5, 13))
        prompts.append(int(rng.integers(1, 4)))
        texts.append([CYCLE[(start + i) % len(CYCLE)] for i in range(prompts[-1] + length)])
    return from_sequences(texts, prompts)


def store(folder: Path, records: Records, **options) -> Features:
    """Hidden states of the tiny backbone, on disk and read back."""
    backbone, params = tiny_backbone()
    options = {"seed": 0, "fingerprint": "tiny", "progress": lambda *_: None} | options
    extract_features(backbone, params, records, folder, **options)
    return load_features(folder)


def problem(stored: Stored, size: int | None = None) -> tuple[Examples, jnp.ndarray]:
    """Examples and output rows; all ids that occur, or fewer."""
    records, features = stored
    held = held_out_records(records, every=4)
    vocab = choose_draft_vocab(records, held, vocab_size=61, eos_ids=(60,), size=size or 10, coverage=None)
    _, params = tiny_backbone()
    examples = make_examples(features, records, held, vocab, num_heads=HEADS)
    return examples, jnp.asarray(output_matrix(params))[vocab.ids]


def recipe(steps: int = 12, **options) -> Recipe:
    """A few updates with frequent lines, measures and checkpoints."""
    loop = LoopConfig(steps=steps, log_every=2, eval_every=5, checkpoint_every=4)
    return Recipe(loop=loop, batch=32, learning_rate=1e-2, **options)


def run(
    folder: Path,
    stored: Stored,
    settings: Recipe,
    report: Report = lambda line: None,
    size: int = 10,
    teacher: float = 0.0,
    subject: Subject = SUBJECT,
) -> Trained:
    """Trains Medusa heads on stored texts."""
    examples, rows = problem(stored, size)
    constants = Constants(rows, jnp.zeros((1, 32)))
    shape = MedusaConfig(32, 61, num_heads=HEADS, draft_vocab_size=size)
    kind = DraftLoss(depth_weights(0.8, HEADS), teacher)
    task = medusa_problem(shape, examples, constants, kind, seed=0, part=4096)
    return train_heads(task, settings, constants, folder=folder, subject=subject, data="tiny", report=report)


class Killed(Exception):
    """Stands for a kill: nothing in the package catches it."""


def killer(when: int) -> Report:
    """Kills the run as it reports this update."""

    def report(line: dict) -> None:
        if line["step"] == when:
            raise Killed

    return report


def log_lines(folder: Path) -> list[dict]:
    """The log without its times."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def command(model: Path, folder: Path, *more: str) -> list[str]:
    """Arguments of a short run of ``train.py`` on texts that are written there; later flags win."""
    save_records(folder / "data.npz", cyclic_records())
    paths = {"--model": model, "--data": folder / "data.npz", "--out": folder / "run", "--cache-dir": folder / "cache"}
    options = {"--num-heads": 2, "--steps": 6, "--batch": 32, "--log-every": 3, "--lr": 0.01}
    return [str(word) for pair in (paths | options).items() for word in pair] + [*more]
