"""One training run of Medusa heads, from stored examples to measured parameters."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.heads.medusa import MedusaConfig
from entmtp_jax.training.accuracy import Accuracies, build_target_ranks, evaluate
from entmtp_jax.training.examples import Examples
from entmtp_jax.training.loop import LoopConfig, Report, batch_indices, run_loop
from entmtp_jax.training.medusa import NUM_FREQUENT, Measures, build_train_step, init_params
from entmtp_jax.training.optimizer import TrainState, build_optimizer, init_state
from entmtp_jax.training.settings import check_settings
from entmtp_jax.types import Array, Float, Int, Params

RUN_FILE = "run.json"


@dataclasses.dataclass(frozen=True)
class MedusaTraining:
    """Everything that decides the result, beside the examples.

    Attributes:
      shape: of the heads.
      loop: lengths and intervals.
      batch: positions per update.
      learning_rate: at its peak.
      weight_decay: of AdamW.
      sampled_rare: rare columns per update that stand for all of them; 0 for the full softmax.
      eval_positions: held-out positions of the evaluations during training; the last one sees all.
      seed: of the order of the positions and of the sampled columns.
    """

    shape: MedusaConfig
    loop: LoopConfig
    batch: int = 2048
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    sampled_rare: int = 0
    eval_positions: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.eval_positions < 1 or self.learning_rate <= 0 or self.weight_decay < 0:
            raise UserError("batch, learning rate and evaluation positions must be positive, weight decay 0 or more")
        if self.sampled_rare and self.shape.own_output:
            raise UserError("the sampled softmax needs the shared output rows; drop --sampled-rare or --own-output")
        if not 0 <= self.sampled_rare <= max(self.shape.num_scored - NUM_FREQUENT, 0):
            raise UserError(
                f"cannot sample {self.sampled_rare} rare ids: the heads score {self.shape.num_scored} ids, of which "
                f"the first {NUM_FREQUENT} are never sampled; use 0 for the full softmax"
            )


class TrainedMedusa(NamedTuple):
    """Result of a run.

    Attributes:
      params: of ``MedusaBlocks``, rounded to bfloat16, as they are written.
      held_out: accuracies of exactly these parameters on all held-out positions.
    """

    params: Params
    held_out: Accuracies


def train_medusa(
    training: MedusaTraining, examples: Examples, rows: Float[Array, "X D"], *, folder: Path, data: str, report: Report
) -> TrainedMedusa:
    """Trains to the end, from the last checkpoint in ``folder`` if there is one.

    Args:
      training: what to do.
      examples: positions and targets.
      rows: the backbone's output rows of the scored ids, most frequent first.
      folder: of the run.
      data: tells examples apart, so that a run is not continued on others.
      report: gets every log line.

    Raises:
      UserError: the folder holds a run with other settings or data, or there are too few positions.
    """
    check_settings(folder / RUN_FILE, {**dataclasses.asdict(training), "data": data})
    optimizer = build_optimizer(training.learning_rate, training.loop.steps, training.weight_decay)
    train_step = build_train_step(training.shape, optimizer)
    target_ranks = build_target_ranks(training.shape)
    sample = np.random.default_rng(training.seed).permutation(examples.held_out)[: training.eval_positions]
    interim = np.sort(sample)

    def measure(params: Params, positions: np.ndarray) -> Accuracies:
        return evaluate(target_ranks, params, examples, positions, rows)

    def update(state: TrainState, step: int) -> tuple[TrainState, Measures]:
        count = len(examples.train)
        chosen = batch_indices(step, count=count, batch=training.batch, seed=training.seed)
        return train_step(state, examples.batch(examples.train[chosen]), rows, sampled_columns(training, step))

    state = run_loop(
        init_state(init_params(training.shape, rows, training.seed), optimizer),
        training.loop,
        folder=folder,
        update=update,
        evaluate=lambda params: measure(params, interim)._asdict(),
        report=report,
    )
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    return TrainedMedusa(rounded, measure(rounded, examples.held_out))


def sampled_columns(training: MedusaTraining, step: int) -> Int[np.ndarray, " m"] | None:
    """The rare columns of one update, distinct and uniform; None for the full softmax."""
    if training.sampled_rare == 0:
        return None
    random = np.random.default_rng((training.seed, step, 1))  # another stream than the order's
    num_rare = training.shape.num_scored - NUM_FREQUENT
    chosen = random.choice(num_rare, training.sampled_rare, replace=False)
    return (NUM_FREQUENT + chosen).astype(np.int32)


def token_order(params: Params, draft_ids: np.ndarray) -> Params:
    """Parameters of heads over the whole vocabulary, their own output matrices in the order of the token ids."""
    if "output" not in params:
        return params
    return params | {"output": params["output"][:, np.argsort(draft_ids)]}
