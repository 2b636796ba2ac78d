"""The layers of an MTP module: one transformer block that drafts recursively (DeepSeek-V3, section 2.2; MiMo; FastMTP).

At position t it reads the hidden state h_t and the embedding of the token at t+1, and predicts the token at
t+2: ``x_t = block(projection [norm(embedding), norm(h_t)])``, logits from ``norm(x_t)``. Along a drafted
path it reads its own output in place of the backbone's. It has keys and values of its own: of the committed
text, and of the drafted nodes, of which a node sees its ancestors only.
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
class MTPConfig(ScoredIds):
    """Shape of an MTP head.

    Attributes:
      hidden_size: D of the backbone.
      vocab_size: V of the backbone.
      max_depth: tokens that it may draft along a path.
      num_modules: 1 for one module applied recursively; otherwise level i uses module i, and levels beyond the
        last module use the last.
      draft_vocab_size: ids that are scored; None means all of them.
      intermediate_size: of the block's MLP; the block is of the backbone's family and otherwise of its shape.
      embedding_first: the projection reads [embedding, hidden], as released weights do; otherwise [hidden, embedding].
      normed_hidden: hidden states are read after the final norm, the backbone's as the module's own.
    """

    hidden_size: int
    vocab_size: int
    intermediate_size: int
    max_depth: int = 7
    num_modules: int = 1
    draft_vocab_size: int | None = None
    embedding_first: bool = True
    normed_hidden: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_modules <= self.max_depth:
            raise UserError(f"an MTP head needs at least one module and no more than levels; got {self}")
        self.check_scored()

    def block(self, backbone: BackboneConfig) -> BackboneConfig:
        """Shape of the block: one layer of the backbone's family."""
        return block_config(backbone, self.intermediate_size)


class MTPModule(nn.Module):
    """One module: two norms, the projection, a transformer layer and the final norm."""

    config: MTPConfig
    block: BackboneConfig
    linear: Linear = linear_highest
    attend: Attend = two_part_attention

    def setup(self) -> None:
        c, eps = self.config, self.block.norm_eps
        self.embedding_norm, self.hidden_norm, self.final_norm = RMSNorm(eps), RMSNorm(eps), RMSNorm(eps)
        self.projection = self.param("projection", nn.initializers.normal(0.02), (c.hidden_size, 2 * c.hidden_size))
        self.layer = Layer(self.block, self.linear, self.attend)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        self_mask: Bool[Array, "#B T T"],
        cached: KVCache,
        lengths: RowInts,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """The block's output before the final norm, and the keys and values of the T new entries.

        Args:
          hidden: of the backbone, or of this head's previous level.
          embedded: embeddings of the tokens after these positions.
          positions: absolute positions of the entries.
          self_mask: which entry sees which.
          cached: ``[B, G, S, C]`` keys and values of the committed text; read only.
          lengths: ``[B]`` committed entries.
        """
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        joined = jnp.concatenate(parts if self.config.embedding_first else parts[::-1], axis=-1)
        x = self.linear(joined, self.projection)
        rope = rope_tables(rope_frequencies(self.block), positions)
        x, (new, _) = self.layer(x, *one_layer(cached), rope, self_mask, lengths)
        return x, new

    def normed(self, x: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
        """The block's output after the final norm: what is scored."""
        return self.final_norm(x)


def init_modules(config: MTPConfig, block: BackboneConfig, key: PRNGKey) -> list[Params]:
    """Random parameters of every module."""
    one = jnp.zeros((1, 1, config.hidden_size))
    place, length = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)

    def touch_all(module: MTPModule) -> Array:
        return module.normed(module(one, one, place, causal_mask(1), empty_cache(block, 1, 1), length)[0])

    module = MTPModule(config, block)
    return [nn.init(touch_all, module)(key)["params"] for key in jax.random.split(key, config.num_modules)]


def repeat_backbone(config: MTPConfig, modules: list[Params], *, norm_scale: float) -> list[Params]:
    """Modules from which training starts: they repeat the backbone's own next-token guess.

    The projection is the identity on the hidden half, and the block adds nothing to its input.

    Args:
      config: shape of the head.
      modules: from ``init_modules``.
      norm_scale: of the final norm. The root mean square of the backbone's normed states keeps their size, which
        is what its output matrix expects.
    """
    size = config.hidden_size
    halves = [jnp.zeros((size, size)), jnp.eye(size)]
    projection = jnp.concatenate(halves if config.embedding_first else halves[::-1], axis=1)
    norm = {"scale": jnp.full(size, norm_scale)}
    return [
        module | {"layer": silent_layer(module["layer"]), "projection": projection, "final_norm": norm}
        for module in modules
    ]
