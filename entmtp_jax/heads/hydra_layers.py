"""The layers of Hydra heads: every head sees the tokens drafted before it (Hydra, sections 3 and 4).

Head i predicts the token at t+2+i from the hidden state at t and the tokens from t+1 to t+1+i:
``x = [p_t; emb(x_{t+1}); ...; emb(x_{t+1+i})]``, ``z = (R x + r) + silu(W x + w)``, and then one residual block
``z + silu(U z + u)``, applied ``num_layers - 1`` times. In Hydra++ p_t comes from a *prefix layer*, a transformer
layer over the backbone's final normed hidden states with keys and values of its own; in Hydra it is that
hidden state itself.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from entmtp_jax.backbone.attention import Attend, causal_mask, two_part_attention
from entmtp_jax.backbone.cache import KVCache
from entmtp_jax.backbone.precision import Linear, linear_highest
from entmtp_jax.backbone.rope import rope_frequencies, rope_tables
from entmtp_jax.backbone.transformer import Layer, RMSNorm
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.heads.block import block_config, empty_cache, one_layer, silent_layer
from entmtp_jax.heads.candidates import ScoredIds
from entmtp_jax.types import Array, Bool, Float, Int, Params, PRNGKey, RowInts


@dataclasses.dataclass(frozen=True)
class HydraConfig(ScoredIds):
    """Shape of a set of Hydra heads.

    Attributes:
      hidden_size: D of the backbone.
      vocab_size: V of the backbone.
      num_heads: K.
      num_layers: of each head: the one that reads the tokens, and how often the residual block follows, plus one.
      prefix: with a prefix layer (Hydra++).
      intermediate_size: of the prefix layer's MLP; the layer is of the backbone's family and otherwise of its shape.
      draft_vocab_size: ids that the heads score; None means all of them.
      own_output: each head has an output matrix with bias of its own; otherwise all share the backbone's rows.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 4
    prefix: bool = True
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    own_output: bool = False

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 1:
            raise UserError(f"Hydra heads need at least one head and one layer; got {self}")
        if self.prefix and not self.intermediate_size:
            raise UserError("a prefix layer needs an intermediate size; give one, or choose heads without prefix layer")
        self.check_scored()

    def block(self, backbone: BackboneConfig) -> BackboneConfig:
        """Shape of the prefix layer: one layer of the backbone's family."""
        return block_config(backbone, self.intermediate_size or backbone.intermediate_size)


class Affine(nn.Module):
    """``W x + b`` with W of shape ``[out, in]``."""

    shape: tuple[int, int]
    linear: Linear

    @nn.compact
    def __call__(self, x: Float[Array, "*any I"]) -> Float[Array, "*any O"]:
        kernel = self.param("kernel", nn.initializers.normal(0.02), self.shape)
        return self.linear(x, kernel) + self.param("bias", nn.initializers.zeros, self.shape[:1])


class HydraHead(nn.Module):
    """One head: the layer that reads the hidden state and ``num_tokens`` tokens, and the residual block."""

    config: HydraConfig
    num_tokens: int
    linear: Linear

    def setup(self) -> None:
        c = self.config
        wide = (c.hidden_size, c.hidden_size * (self.num_tokens + 1))
        self.skip, self.entry = Affine(wide, self.linear), Affine(wide, self.linear)
        if c.num_layers > 1:
            self.residual = Affine((c.hidden_size, c.hidden_size), self.linear)
        if c.own_output:
            self.output = Affine((c.num_scored, c.hidden_size), self.linear)

    def __call__(self, joined: Float[Array, "*any I"]) -> Float[Array, "*any D"]:
        x = self.skip(joined) + nn.silu(self.entry(joined))
        for _ in range(self.config.num_layers - 1):
            x = x + nn.silu(self.residual(x))
        return x

    def scores(self, state: Float[Array, "*any D"]) -> Float[Array, "*any scored"]:
        """Logits by the head's own output matrix."""
        return self.output(state)


class HydraHeads(nn.Module):
    """All heads; which one runs follows from the number of tokens that it is given."""

    config: HydraConfig
    linear: Linear = linear_highest

    def setup(self) -> None:
        self.head = [HydraHead(self.config, i + 1, self.linear) for i in range(self.config.num_heads)]

    def __call__(self, prefix: Float[Array, "*any D"], path: Float[Array, "*any tokens D"]) -> Float[Array, "*any D"]:
        """State of head ``tokens - 1``, whose products with the output rows are its logits.

        Args:
          prefix: p_t.
          path: embeddings of the tokens at t+1 .. t+tokens.
        """
        joined = jnp.concatenate([prefix[..., None, :], path], axis=-2)
        return self.head[path.shape[-2] - 1](joined.reshape(*prefix.shape[:-1], -1))

    def scores(
        self, state: Float[Array, "*any D"], index: int, shared_output: Float[Array, "X D"]
    ) -> Float[Array, "*any scored"]:
        """Logits of head ``index`` over the scored ids.

        Args:
          state: of the head.
          index: static.
          shared_output: the backbone's rows of the scored ids; unused by heads that own theirs.
        """
        return self.head[index].scores(state) if self.config.own_output else self.linear(state, shared_output)


class HydraPrefix(nn.Module):
    """The prefix layer and its norm."""

    block: BackboneConfig
    linear: Linear = linear_highest
    attend: Attend = two_part_attention

    def setup(self) -> None:
        self.layer = Layer(self.block, self.linear, self.attend)
        self.norm = RMSNorm(self.block.norm_eps)

    def __call__(
        self,
        normed: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        self_mask: Bool[Array, "#B T T"],
        cached: KVCache,
        lengths: RowInts,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """The hidden states p at T positions, and the keys and values of these.

        Args:
          normed: final normed hidden states of the backbone.
          positions: absolute positions.
          self_mask: which position sees which.
          cached: ``[B, G, S, C]`` keys and values of the committed text; read only.
          lengths: ``[B]`` committed entries.
        """
        rope = rope_tables(rope_frequencies(self.block), positions)
        x, (new, _) = self.layer(normed, *one_layer(cached), rope, self_mask, lengths)
        return self.norm(x), new


def init_hydra(config: HydraConfig, block: BackboneConfig, key: PRNGKey) -> Params:
    """Random parameters ``{"heads": ..., "prefix": ...}``; the latter only with a prefix layer."""
    one = jnp.zeros((1, 1, config.hidden_size))
    rows = jnp.zeros((config.num_scored, config.hidden_size))

    def touch_all(module: HydraHeads) -> list[Array]:
        paths = [jnp.zeros((1, 1, i + 1, config.hidden_size)) for i in range(config.num_heads)]
        return [module.scores(module(one, path), i, rows) for i, path in enumerate(paths)]

    heads_key, prefix_key = jax.random.split(key)
    params: Params = {"heads": nn.init(touch_all, HydraHeads(config))(heads_key)["params"]}
    if config.prefix:
        place, length = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        arguments = (one, place, causal_mask(1), empty_cache(block, 1, 1), length)
        params["prefix"] = HydraPrefix(block).init(prefix_key, *arguments)["params"]
    return params


def repeat_backbone(
    config: HydraConfig, params: Params, *, norm_scale: float | Float[Array, " D"], rows: Float[Array, "X D"]
) -> Params:
    """Parameters from which training starts: every head repeats the backbone's own next-token guess.

    The skip connection passes p_t on, the prefix layer adds nothing to its input, everything else is zero.

    Args:
      config: shape of the heads.
      params: from ``init_hydra``.
      norm_scale: of the prefix layer's norm, one number or one per channel. The root mean square of the
        backbone's normed states keeps their size, which is what its output matrix expects.
      rows: ``[X, D]`` the backbone's output rows of the scored ids; for heads that own their matrices.
    """
    heads = jax.tree.map(jnp.zeros_like, params["heads"])
    for head in heads.values():
        skip = head["skip"]["kernel"]
        head["skip"]["kernel"] = skip.at[:, : config.hidden_size].set(jnp.eye(config.hidden_size))
        if config.own_output:
            head["output"]["kernel"] = rows.astype(jnp.float32)
    if not config.prefix:
        return {"heads": heads}
    norm = {"scale": jnp.broadcast_to(norm_scale, (config.hidden_size,)).astype(jnp.float32)}
    return {"heads": heads, "prefix": {"layer": silent_layer(params["prefix"]["layer"]), "norm": norm}}
