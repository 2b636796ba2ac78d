"""What heads offer: ranked tokens with their log-probabilities, over the whole vocabulary or a part of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.types import Array, Float, Int, Params

NO_TOKEN = -1  # an empty node: it is never right


class Candidates(NamedTuple):
    """What a head offers below some nodes, the most probable first.

    Attributes:
      tokens: ``[B, P, R]`` different ids below each of P nodes; ``NO_TOKEN`` where there are fewer.
      logprobs: ``[B, P, R]`` the head's log-probability of each given its node; -inf where there is none.
    """

    tokens: Int[Array, "B P R"]
    logprobs: Float[Array, "B P R"]


class Draft(NamedTuple):
    """Tokens on the nodes of one topology.

    Attributes:
      tokens: ``[B, N]``; row 0 is the root; ``NO_TOKEN`` marks an empty node.
      logprobs: ``[B, N]`` the head's log-probability of each node given its parent; 0 for the root.
    """

    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]


class ScoredIds:
    """Mixin of heads' shapes: how many ids are scored.

    Attributes:
      vocab_size: V of the backbone.
      draft_vocab_size: ids that are scored; None means all of them.
    """

    vocab_size: int
    draft_vocab_size: int | None

    @property
    def num_scored(self) -> int:
        """Ids that the head scores."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def check_scored(self) -> None:
        """Refuses a draft vocabulary that is no part of the vocabulary."""
        if not 0 < self.num_scored <= self.vocab_size:
            raise UserError(f"draft vocabulary of {self.num_scored} ids, but the model has {self.vocab_size}")

    def check_top_k(self, top_k: int) -> None:
        """Refuses to rank more candidates than ids are scored."""
        if top_k > self.num_scored:
            raise UserError(f"top-k of {top_k} candidates, but the heads score only {self.num_scored} ids")


def rank_candidates(logits: Float[Array, "B P X"], top_k: int, draft_ids: Int[Array, " X"] | None) -> Candidates:
    """The best ``top_k`` ids below every node, as ids of the whole vocabulary.

    Args:
      logits: of the scored ids.
      top_k: R.
      draft_ids: the scored ids; None when they are the whole vocabulary.
    """
    best, columns = jax.lax.top_k(logits, top_k)
    logprobs = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return Candidates(columns if draft_ids is None else draft_ids[columns], logprobs)


def scored_vocabulary(draft_ids: np.ndarray | None, output: Float[Array, "V D"] | None) -> Params:
    """Parameters that say which ids a head scores: ``draft_ids``, and ``output`` with their rows, gathered once.

    Args:
      draft_ids: ``[X]`` int32 ids, or None for the whole vocabulary: nothing is copied then.
      output: the backbone's output matrix; None for a head that owns its output matrices.
    """
    if draft_ids is None:
        return {}
    ids = jnp.asarray(draft_ids, jnp.int32)
    return {"draft_ids": ids} if output is None else {"draft_ids": ids, "output": jnp.take(output, ids, axis=0)}


def scored_rows(params: Params, output: Float[Array, "V D"]) -> Float[Array, "X D"]:
    """The output rows of the scored ids: those of ``scored_vocabulary``, or all of the backbone's."""
    return params["output"] if "output" in params else output
