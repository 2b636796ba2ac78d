"""The kinds of heads that ``train`` knows: shape, fresh parameters, loss and measure of each."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from entmtp_jax.backbone.precision import Linear, linear_bfloat16, linear_highest
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.heads import hydra_layers, mtp_layers
from entmtp_jax.heads.hydra_layers import HydraConfig
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.heads.mtp_layers import MTPConfig
from entmtp_jax.training.data import Records
from entmtp_jax.training.examples import DraftVocab, make_examples
from entmtp_jax.training.features import Features
from entmtp_jax.training.head_run import Constants, Problem
from entmtp_jax.training.losses import DraftLoss, depth_weights
from entmtp_jax.training.medusa import medusa_problem
from entmtp_jax.training.rollout import States, hydra_states, mtp_states
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
    kind = _loss(args, shape.num_heads)
    return medusa_problem(shape, examples, setting.constants, kind, seed=args.seed, part=EVAL_POSITIONS)


# What a pass computes with; a bfloat16 product casts its operands, so the parameters themselves stay float32.
PRODUCTS = {"float32": linear_highest, "bfloat16": linear_bfloat16}


def _loss(args: argparse.Namespace, levels: int) -> DraftLoss:
    return DraftLoss(depth_weights(args.depth_decay, levels), args.teacher, PRODUCTS[args.compute_dtype])


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
        params = hydra_layers.init_hydra(shape, block, jax.random.key(args.seed))
        return hydra_layers.repeat_backbone(shape, params, norm_scale=setting.hidden_scale, rows=setting.constants.rows)

    def states(levels: int, linear: Linear) -> States:
        return hydra_states(shape, block, levels, linear=linear)

    return _on_sequences(args, setting, shape, init, states, shape.num_heads)


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
        modules = mtp_layers.init_modules(shape, block, jax.random.key(args.seed))
        return {"modules": mtp_layers.repeat_backbone(shape, modules, norm_scale=setting.hidden_scale)}

    def states(levels: int, linear: Linear) -> States:
        return mtp_states(shape, block, levels, linear=linear)

    return _on_sequences(args, setting, shape, init, states, shape.max_depth)


def _on_sequences(
    args: argparse.Namespace,
    setting: Setting,
    shape: Any,
    init: Callable[[], Params],
    states: Callable[[int, Linear], States],
    depth: int,
) -> Problem:
    if args.own_output:
        raise UserError("--own-output: only Medusa heads are trained with output matrices of their own")
    levels = min(args.train_depth or depth, depth)
    kind = _loss(args, levels)
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
        states(levels, kind.linear),
        train,
        build_measure(states(depth, linear_highest), held, setting.features.hidden, setting.constants, part=EVAL_ROWS),
        setting.features.hidden,
        kind,
        bases=args.bases,
    )


PROBLEMS: dict[str, Callable[[argparse.Namespace, Setting], Problem]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "hydra++": _hydra,
    "mtp": _mtp,
}
