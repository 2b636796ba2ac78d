"""Frozen, hashable configurations; they are passed statically and never hold arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from entmtp_jax.errors import UserError

ROPE_KINDS = ("none", "linear", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rescaling of the rotary frequencies for contexts longer than the pre-training length.

    ``linear`` divides every frequency by ``factor``; ``llama3`` divides the low frequencies only and
    interpolates between (the rule of the Llama 3.1 release, as in ``transformers``).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise UserError(f"RoPE scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """Shape of a Llama-family decoder (Llama, Vicuna, SmolLM2, Mistral without window, Qwen2.5).

    Attributes:
      qkv_bias: the query, key and value projections have a bias (Qwen2.5).
      tie_embeddings: the output matrix is the embedding matrix.
      max_positions: longest sequence the model was made for, in tokens.
      bos_id: token that stands for an empty prompt; None if the tokenizer has none.
      eos_ids: tokens that end a text.
      scan_layers: stack the layers and run them by ``lax.scan`` (short compile times on TPU)
        instead of unrolling them (2-3 times faster on CPU). Results are equal.
      taps: layers whose *input* hidden state is returned beside the final one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    tie_embeddings: bool = False
    max_positions: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    scan_layers: bool = False
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even size")
        bad = [t for t in self.taps if not 0 <= t < self.num_layers]
        if bad:
            raise UserError(f"taps {bad} lie outside the {self.num_layers} layers")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def to_json(self) -> dict[str, Any]:
        """A plain dict; ``from_json`` inverts it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BackboneConfig:
        """Builds the config back from ``to_json``'s dict (lists become tuples)."""
        data = dict(data)
        data["rope_scaling"] = RopeScaling(**data.get("rope_scaling", {}))
        for name in ("eos_ids", "taps"):
            data[name] = tuple(data.get(name, ()))
        return cls(**data)
