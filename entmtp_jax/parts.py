"""What a decoding loop is made of: static choices, the functions of backbone, head and bank, and their parameters."""

import dataclasses
from typing import NamedTuple

from entmtp_jax.backbone.transformer import Backbone, output_matrix
from entmtp_jax.bank import Bank
from entmtp_jax.heads.interface import Head, Shared
from entmtp_jax.sampling import Select
from entmtp_jax.types import Params

# Rows of a bfloat16 tile on a TPU. With another number of slots XLA lays the cache out with the heads innermost
# and copies all of it into the loop's layout and back in every call.
SLOT_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Static choices of a decoder; each set is one compiled program.

    Attributes:
      batch: B, rows decoded together.
      capacity: cache slots that a row may fill, prompt and emitted tokens together.
      chunk: W, prompt tokens per prefill pass.
      fresh_signals: propose before choosing, so that the scheduler sees the heads' own confidence in this
        very draft; otherwise the whole draft happens inside the branch, as deep as the topology needs.
      cache_dtype: of keys and values.
    """

    batch: int = 1
    capacity: int = 1024
    chunk: int = 64
    fresh_signals: bool = False
    cache_dtype: str = "float32"


class ModelParams(NamedTuple):
    """Parameters of the backbone and of the head that drafts for it."""

    backbone: Params
    head: Params

    @property
    def shared(self) -> Shared:
        """The backbone's matrices that the head may read."""
        return shared_matrices(self.backbone)


class Parts(NamedTuple):
    """Functions and static choices of one loop.

    Attributes:
      backbone: verifies.
      head: drafts.
      bank: topologies to switch among.
      config: static choices.
      select: how a token is chosen from logits.
    """

    backbone: Backbone
    head: Head
    bank: Bank
    config: DecodeConfig
    select: Select

    @property
    def cache_slots(self) -> int:
        """Slots so that neither the last prefill chunk nor a write of E rows at the edge is ever clamped."""
        chunks = -(-self.config.capacity // self.config.chunk)
        slots = max(chunks * self.config.chunk, self.config.capacity + self.bank.depth + 1)
        return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE

    @property
    def token_slots(self) -> int:
        """Room for the text, and for the last prefill chunk's next tokens."""
        return self.cache_slots + 2


def shared_matrices(params: Params) -> Shared:
    """The backbone's matrices that a head may read."""
    return Shared(embedding=params["embed"]["embedding"], output=output_matrix(params))
