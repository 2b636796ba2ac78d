"""What the backbone makes of texts that it wrote: one pass over each whole text, many together."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.transformer import Backbone
from entmtp_jax.calibration.trace import KnownText
from entmtp_jax.training.data import Records
from entmtp_jax.training.features import LENGTH_STEP, build_text_pass, plan_batches
from entmtp_jax.types import Params

BATCH_TOKENS = 1024  # fewer than for training data: with few texts most batches are not full


def read_texts(
    backbone: Backbone, params: Params, records: Records, progress: Callable[[int, int], None]
) -> list[KnownText]:
    """Hidden states of whole texts, in float32.

    Args:
      backbone: wrote the texts.
      params: its parameters.
      records: prompts and answers.
      progress: called with (texts done, texts in all).
    """
    run = build_text_pass(backbone)
    states: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros((0, 0)), np.zeros((0, 0)))] * records.num_records
    done = 0
    for batch in plan_batches(records, seed=0, batch_tokens=BATCH_TOKENS):
        length = int(-(-records.lengths[batch].max() // LENGTH_STEP) * LENGTH_STEP)
        tokens = np.zeros((max(1, BATCH_TOKENS // length), length), np.int32)
        for row, index in enumerate(batch):
            tokens[row, : records.lengths[index]] = records.record(index)
        normed, hidden = (np.asarray(x) for x in run(params, jnp.asarray(tokens)))
        for row, index in enumerate(batch):
            own = slice(int(records.lengths[index]))
            states[index] = normed[row, own].copy(), hidden[row, own].copy()  # so that the padding can be freed
        done += len(batch)
        progress(done, records.num_records)
    return [
        KnownText(records.record(index), int(records.prompt_length[index]), *both) for index, both in enumerate(states)
    ]
