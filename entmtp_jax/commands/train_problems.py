"""The kinds of heads that ``train`` knows: shape, fresh parameters, loss and measure of each."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.heads.hydra_layers import HydraConfig, init_hydra, repeat_backbone
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.heads.mtp import MTPConfig
from entmtp_jax.training.data import Records
from entmtp_jax.training.examples import (
    DraftVocab,
    make_examples,
)
from entmtp_jax.training.features import Features
from entmtp_jax.training.head_run import Constants, Problem
from entmtp_jax.training.losses import DraftLoss, depth_weights
from entmtp_jax.training.medusa import medusa_problem
from entmtp_jax.training.rollout import States, hydra_states, init_mtp, mtp_states
from entmtp_jax.training.sequence_problem import build_measure, sequence_problem
from entmtp_jax.training.sequences import pack_rows
from entmtp_jax.types import Params

EVAL_POSITIONS, EVAL_ROWS = 4096, 16  # measured while training goes on


class Setting(NamedTuple):
    """What every kind of heads is trained on.

    Attributes:
      config: shape of the backbone.
      constants: its matrices.
      records: all of them.
      held: ``[records]`` which are held out.
      vocab: the scored ids.
      features: hidden states of the records, or of a part of them.
      mark: says which weights and records these are.
    """

    config: BackboneConfig
    constants: Constants
    records: Records
    held: np.ndarray
    vocab: DraftVocab
    features: Features
    mark: str

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that the heads score; None for all."""
        return None if self.vocab.is_whole else len(self.vocab.ids)

    @property
    def hidden_scale(self) -> float:
        """Root mean square of the backbone's final normed hidden states."""
        return float(np.sqrt(np.square(self.features.hidden[:4096].astype(np.float32)).mean()))


def _medusa(args: argparse.Namespace, setting: Setting) -> Problem:
    shape = MedusaConfig(
        hidden_size=setting.config.hidden_size,
        vocab_size=setting.config.vocab_size,
        draft_vocab_size=setting.draft_vocab_size,
        num_heads=4 if args.num_heads is None else args.num_heads,
        num_layers=1 if args.num_layers is None else args.num_layers,
        own_output=args.own_output,
    )
    examples = make_examples(setting.features, setting.records, setting.held, setting.vocab, num_heads=shape.num_heads)
    kind = DraftLoss(depth_weights(args.depth_decay, shape.num_heads), args.teacher)
    return medusa_problem(shape, examples, setting.constants, kind, seed=args.seed, part=EVAL_POSITIONS)


def _hydra(args: argparse.Namespace, setting: Setting) -> Problem:
    prefix = args.heads == "hydra++"
    shape = HydraConfig(
        hidden_size=setting.config.hidden_size,
        vocab_size=setting.config.vocab_size,
        draft_vocab_size=setting.draft_vocab_size,
        num_heads=4 if args.num_heads is None else args.num_heads,
        num_layers=4 if args.num_layers is None else args.num_layers,
        prefix=prefix,
        intermediate_size=setting.config.intermediate_size if prefix else None,
    )
    block = shape.block(setting.config)

    def init() -> Params:
        params = init_hydra(shape, block, jax.random.key(args.seed))
        return repeat_backbone(shape, params, norm_scale=setting.hidden_scale, rows=setting.constants.rows)

    return _on_sequences(args, setting, shape, init, lambda levels: hydra_states(shape, block, levels), shape.num_heads)


def _mtp(args: argparse.Namespace, setting: Setting) -> Problem:
    shape = MTPConfig(
        hidden_size=setting.config.hidden_size,
        vocab_size=setting.config.vocab_size,
        draft_vocab_size=setting.draft_vocab_size,
        intermediate_size=setting.config.intermediate_size,
        max_depth=7 if args.num_heads is None else args.num_heads,
        num_modules=args.num_modules,
    )
    block = shape.block(setting.config)

    def init() -> Params:
        return init_mtp(shape, block, jax.random.key(args.seed), norm_scale=setting.hidden_scale)

    return _on_sequences(args, setting, shape, init, lambda levels: mtp_states(shape, block, levels), shape.max_depth)


def _on_sequences(
    args: argparse.Namespace,
    setting: Setting,
    shape: Any,
    init: Callable[[], Params],
    states: Callable[[int], States],
    depth: int,
) -> Problem:
    if args.own_output:
        raise UserError("--own-output: only Medusa heads are trained with output matrices of their own")
    levels = min(args.train_depth or depth, depth)
    train, held = (
        pack_rows(
            setting.features,
            setting.records,
            np.flatnonzero(chosen),
            setting.vocab.ids,
            row_length=args.row_length,
            seed=args.seed,
        )
        for chosen in (~setting.held, setting.held)
    )
    return sequence_problem(
        shape,
        init,
        (states(levels), train),
        build_measure(states(depth), held, setting.features.hidden, setting.constants, part=EVAL_ROWS),
        setting.features.hidden,
        DraftLoss(depth_weights(args.depth_decay, levels), args.teacher),
        bases=args.bases,
    )


PROBLEMS: dict[str, Callable[[argparse.Namespace, Setting], Problem]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "hydra++": _hydra,
    "mtp": _mtp,
}
