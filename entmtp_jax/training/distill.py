"""Self-distillation: the backbone answers prompts, and the answers become records to train heads on.

Heads draft what the backbone would write, so its own text teaches them best. Prompts are answered in
batches of similar length; every finished batch is one shard, and a killed run goes on after the last one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from entmtp_jax.backbone.transformer import Backbone
from entmtp_jax.bank import Bank
from entmtp_jax.decode import DecodeConfig, ModelParams, build_decoder
from entmtp_jax.errors import UserError
from entmtp_jax.generation import Completion, generate
from entmtp_jax.heads.interface import Head
from entmtp_jax.scheduler import Policy
from entmtp_jax.state import Request
from entmtp_jax.training.data import from_sequences, read_ids, save_records
from entmtp_jax.training.settings import check_settings

SETTINGS_FILE = "distill.json"
SHARDS = "shard_*.npz"


class Question(NamedTuple):
    """A prompt as the backbone reads it.

    Attributes:
      id: of the prompt.
      tokens: ids, chat template included.
    """

    id: str
    tokens: Sequence[int]


class Writer(NamedTuple):
    """What writes the answers; heads, bank and policy decide how fast, never what.

    Attributes:
      backbone: whose answers they are.
      head: drafts.
      params: of both.
      bank: topologies of the drafts.
      policy: picks among them.
    """

    backbone: Backbone
    head: Head
    params: ModelParams
    bank: Bank
    policy: Policy


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """How prompts are answered.

    Attributes:
      eos_ids: tokens that end an answer.
      max_new_tokens: where an answer that does not end by itself is cut.
      batch: prompts answered together.
      chunk: prompt tokens per prefill pass.
    """

    eos_ids: tuple[int, ...] = ()
    max_new_tokens: int = 192
    batch: int = 16
    chunk: int = 64

    def __post_init__(self) -> None:
        if min(self.max_new_tokens, self.batch, self.chunk) < 1:
            raise UserError(f"new tokens, batch and chunk must be at least 1; got {self}")


def plan_batches(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Batches of similar prompt length, in an order that depends on the questions only.

    Example: prompts a, b, c of 5, 1 and 4 tokens in batches of two: [b, c], [a].
    """
    ordered = sorted(questions, key=lambda question: (len(question.tokens), question.id))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def distill(
    writer: Writer,
    questions: Sequence[Question],
    folder: Path,
    config: DistillConfig,
    *,
    settings: dict[str, str | int | None],
    progress: Callable[[int, int], None],
) -> int:
    """Answers every question that no shard in ``folder`` answers yet.

    Args:
      writer: of the answers.
      questions: with distinct ids.
      folder: of the shards.
      config: how to answer.
      settings: what else decides the answers, such as model and system message; a folder that was begun
        with others is refused.
      progress: called with (questions answered, questions in all) at the start and after every batch.

    Returns:
      How many questions were answered now.

    Raises:
      UserError: the folder was begun otherwise, a shard is broken, or the backbone's logits are not finite.
    """
    check_settings(folder / SETTINGS_FILE, {**settings, "max_new_tokens": config.max_new_tokens})
    shards = sorted(folder.glob(SHARDS))
    done = {answered for shard in shards for answered in read_ids(shard)}
    count = sum(question.id in done for question in questions)
    before = count
    progress(count, len(questions))
    if count == len(questions):
        return 0
    answer = _build_answer(writer, questions, config)
    number = 1 + max((int(shard.stem.removeprefix("shard_")) for shard in shards), default=-1)
    for batch in plan_batches(questions, config.batch):
        missing = [question for question in batch if question.id not in done]
        if not missing:
            continue
        pairs = zip(missing, answer(missing), strict=True)
        texts = [[*question.tokens, *completion.tokens] for question, completion in pairs]
        records = from_sequences(texts, [len(question.tokens) for question in missing])
        save_records(folder / f"shard_{number:05d}.npz", records, ids=[question.id for question in missing])
        number, count = number + 1, count + len(missing)
        progress(count, len(questions))
    return count - before


def _build_answer(
    writer: Writer, questions: Sequence[Question], config: DistillConfig
) -> Callable[[Sequence[Question]], list[Completion]]:
    """Answers one batch; one program serves all of them."""
    capacity = max(len(question.tokens) for question in questions) + config.max_new_tokens
    shape = DecodeConfig(batch=config.batch, capacity=capacity, chunk=config.chunk)
    decoder = build_decoder(writer.backbone, writer.head, writer.bank, shape)

    def answer(batch: Sequence[Question]) -> list[Completion]:
        requests = [Request(question.tokens, config.max_new_tokens, config.eos_ids) for question in batch]
        completions = generate(decoder, writer.params, requests, writer.policy).completions
        for question, completion in zip(batch, completions, strict=True):
            if completion.finish_reason == "nonfinite":
                raise UserError(f"prompt {question.id}: the model's logits are not finite; are its weights damaged?")
        return completions

    return answer
