"""One training run of heads of any kind, from a problem to measured parameters."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from entmtp_jax.errors import UserError
from entmtp_jax.training.accuracy import Accuracies
from entmtp_jax.training.loop import LoopConfig, Report, batch_indices, run_loop
from entmtp_jax.training.losses import NUM_FREQUENT
from entmtp_jax.training.optimizer import TrainState, build_optimizer, init_state
from entmtp_jax.training.run_checkpoints import CHECKPOINT_FOLDER, has_checkpoints
from entmtp_jax.training.settings import RUN_FILE, Subject, check_settings, check_subject
from entmtp_jax.types import Array, Float, Int, Params

KEPT_IN_FLOAT32 = ("bias", "scale", "output_bias")

Measures = dict[str, Array]


class Constants(NamedTuple):
    """Matrices of the frozen backbone that losses and measures read.

    Attributes:
      rows: ``[X, D]`` output rows of the scored ids, the most frequent first.
      embedding: ``[V, D]``.
    """

    rows: Float[Array, "X D"]
    embedding: Float[Array, "V D"]


class Problem(NamedTuple):
    """What is trained, on what, and how it is examined.

    Attributes:
      shape: of the heads, a dataclass.
      settings: of their loss and data, as plain values; like the shape, a run must not change them.
      count: how many things a batch is drawn from: positions, or packed rows.
      init: ``() -> params``.
      batch: ``(chosen[batch], random) -> batch``: reads these things.
      loss: ``(params, batch, constants, sampled) -> (loss, loss per depth)``; not compiled.
      measure: ``(params, everything) -> Accuracies`` on held-out text, all of it or a fixed part.
    """

    shape: Any
    settings: dict[str, Any]
    count: int
    init: Callable[[], Params]
    batch: Callable[[Int[np.ndarray, " batch"], np.random.Generator], Any]
    loss: Callable[[Params, Any, Constants, Array | None], tuple[Array, Array]]
    measure: Callable[[Params, bool], Accuracies]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, beside the problem.

    Attributes:
      loop: lengths and intervals.
      batch: positions or rows per pass.
      accumulate: passes per update; their gradients are averaged.
      learning_rate: at its peak.
      weight_decay: of AdamW.
      sampled_rare: rare columns per pass that stand for all of them; 0 for the full softmax.
      seed: of the order of the batches, of the sampled columns and of the places to draft from.
    """

    loop: LoopConfig
    batch: int
    accumulate: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    sampled_rare: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.batch, self.accumulate) < 1 or self.learning_rate <= 0 or self.weight_decay < 0:
            raise UserError("batch, accumulation and learning rate must be positive, weight decay 0 or more")


class Trained(NamedTuple):
    """Result of a run.

    Attributes:
      params: as they are written: matrices rounded to bfloat16, biases and norm scales in float32.
      held_out: accuracies of exactly these parameters on all held-out positions.
    """

    params: Params
    held_out: Accuracies


def train_heads(
    problem: Problem, recipe: Recipe, constants: Constants, *, folder: Path, subject: Subject, data: str, report: Report
) -> Trained:
    """Trains to the end, from the last checkpoint in ``folder`` if there is one.

    Args:
      problem: what to train.
      recipe: how.
      constants: matrices of the backbone.
      folder: of the run.
      subject: kind and backbone, by which the folder is known.
      data: tells examples apart, so that a run is not continued on others.
      report: gets every log line.

    Raises:
      UserError: the folder holds a run of other heads, settings or data, there is too little to train on, the
        training diverges, or the disk is full; see ``run_loop``.
    """
    num_scored = constants.rows.shape[0]
    if not 0 <= recipe.sampled_rare <= max(num_scored - NUM_FREQUENT, 0):
        raise UserError(
            f"cannot sample {recipe.sampled_rare} rare ids: the heads score {num_scored} ids, of which "
            f"the first {NUM_FREQUENT} are never sampled; use 0 for the full softmax"
        )
    shape = {"shape": dataclasses.asdict(problem.shape), "start": None}  # fresh parameters, unless the settings tell
    described = shape | problem.settings | dataclasses.asdict(recipe)
    _claim(folder, subject, described | {"data": data})
    optimizer = build_optimizer(recipe.learning_rate, recipe.loop.steps, recipe.weight_decay)
    gradient, apply = build_gradient(problem), build_update(optimizer)

    def update(state: TrainState, step: int) -> tuple[TrainState, Measures]:
        parts = []
        for part in range(recipe.accumulate):
            place = step * recipe.accumulate + part
            chosen = batch_indices(place, count=problem.count, batch=recipe.batch, seed=recipe.seed)
            batch = problem.batch(chosen, np.random.default_rng((recipe.seed, place, 2)))
            parts.append(gradient(state.params, batch, constants, sampled_columns(recipe, num_scored, place)))
        return apply(state, parts)

    state = run_loop(
        init_state(problem.init(), optimizer),
        recipe.loop,
        folder=folder,
        update=update,
        evaluate=lambda params: problem.measure(params, False)._asdict(),
        report=report,
    )
    rounded = stored_precision(state.params)
    return Trained(rounded, problem.measure(rounded, True))


def _claim(folder: Path, subject: Subject, settings: dict[str, Any]) -> None:
    file = folder / RUN_FILE
    if has_checkpoints(folder) and not file.exists():
        raise UserError(
            f"{folder / CHECKPOINT_FOLDER}: checkpoints without the {RUN_FILE} that says what they are of; restore it "
            "or give another folder"
        )
    check_subject(file, subject)
    check_settings(file, settings, facts={"subject": subject._asdict()})


def build_gradient(problem: Problem) -> Callable[..., tuple[Measures, Params]]:
    """``(params, batch, constants, sampled) -> (measures, gradient)``, compiled."""

    @jax.jit
    def gradient(params: Params, batch: Any, constants: Constants, sampled: Array | None) -> tuple[Measures, Params]:
        value_and_gradient = jax.value_and_grad(problem.loss, has_aux=True)
        (total, per_depth), result = value_and_gradient(params, batch, constants, sampled)
        return {"loss": total, "loss_by_head": per_depth}, result

    return gradient


def build_update(optimizer: optax.GradientTransformation) -> Callable[..., tuple[TrainState, Measures]]:
    """``(state, [(measures, gradient), ...]) -> (state, measures)``: one update from averaged passes, compiled."""

    def apply(state: TrainState, parts: list[tuple[Measures, Params]]) -> tuple[TrainState, Measures]:
        measures, gradient = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *parts)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer_state), measures | {
            "gradient_norm": optax.tree.norm(gradient)
        }

    return jax.jit(apply, donate_argnums=0)


def sampled_columns(recipe: Recipe, num_scored: int, place: int) -> Int[np.ndarray, " m"] | None:
    """The rare columns of one pass, distinct and uniform; None for the full softmax."""
    if recipe.sampled_rare == 0:
        return None
    random = np.random.default_rng((recipe.seed, place, 1))  # another stream than the order's
    chosen = random.choice(num_scored - NUM_FREQUENT, recipe.sampled_rare, replace=False)
    return (NUM_FREQUENT + chosen).astype(np.int32)


def stored_precision(params: Params) -> Params:
    """Parameters as a head's file holds them: matrices in bfloat16, biases and norm scales in float32."""

    def stored(path: tuple[Any, ...], leaf: Array) -> Array:
        name = getattr(path[-1], "key", "")
        return leaf.astype(jnp.float32 if name in KEPT_IN_FLOAT32 else jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(stored, params)
