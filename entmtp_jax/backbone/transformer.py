"""Llama-family decoder as a pure Linen module: the cache is an argument, new keys and values a result."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from entmtp_jax.backbone.attention import Attend, causal_mask, two_part_attention
from entmtp_jax.backbone.cache import KVCache, init_cache
from entmtp_jax.backbone.precision import Linear, linear_highest
from entmtp_jax.backbone.rope import rope_frequencies, rope_tables, rotate
from entmtp_jax.config import BackboneConfig
from entmtp_jax.types import Array, Bool, Float, Int, Params, PRNGKey, RowInts


class BackboneOutput(NamedTuple):
    """What one forward pass returns.

    Attributes:
      hidden: ``[B, T, D]`` output of the last layer, before the final norm.
      normed: ``[B, T, D]`` the same after the final norm; ``unembed`` takes this.
      taps: hidden states at the input of ``config.taps``' layers, each ``[B, T, D]``.
      new: keys (rotated) and values of the T tokens, shaped like a cache with T slots.
    """

    hidden: Float[Array, "B T D"]
    normed: Float[Array, "B T D"]
    taps: tuple[Float[Array, "B T D"], ...]
    new: KVCache


class Backbone(NamedTuple):
    """All that decoding, heads and training know of a backbone: a config and pure functions.

    Attributes:
      config: its shape.
      init: ``key -> params``.
      forward: ``(params, tokens, positions, self_mask, cache, lengths) -> BackboneOutput``.
      unembed: ``(params, normed[..., D]) -> logits[..., V]``, float32.
    """

    config: BackboneConfig
    init: Callable[[PRNGKey], Params]
    forward: Callable[..., BackboneOutput]
    unembed: Callable[[Params, Array], Array]


def _weight_init(key: PRNGKey, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
    return 0.02 * jax.random.normal(key, shape, dtype)


class RMSNorm(nn.Module):
    """``x / rms(x) * scale`` in float32 (Zhang and Sennrich 2019, eq. 4)."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * scale


class Attention(nn.Module):
    """Grouped-query attention; query, key and value projections of a group lie in one matrix."""

    config: BackboneConfig
    linear: Linear
    attend: Attend

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: tuple[Array, Array],
        self_mask: Bool[Array, "#B T T"],
        cached_keys: Float[Array, "B G S C"],
        cached_values: Float[Array, "B G S C"],
        lengths: RowInts,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        c = self.config
        batch, tokens, _ = x.shape
        shape = (c.num_kv_heads, c.queries_per_kv + 2, c.head_dim)
        weight = self.param("qkv", _weight_init, (*shape, c.hidden_size))
        qkv = self.linear(x, weight.reshape(-1, c.hidden_size)).reshape(batch, tokens, *shape)
        if c.qkv_bias:
            qkv = qkv + self.param("qkv_bias", nn.initializers.zeros, shape)
        # Queries and keys rotate together; the value is the last of each group.
        rotated = rotate(qkv[:, :, :, :-1].reshape(batch, tokens, -1, c.head_dim), *rope)
        rotated = rotated.reshape(batch, tokens, c.num_kv_heads, c.queries_per_kv + 1, c.head_dim)
        query = rotated[:, :, :, :-1].reshape(batch, tokens, c.num_heads, c.head_dim)
        keys = rotated[:, :, :, -1].transpose(0, 2, 1, 3).astype(cached_keys.dtype)
        values = qkv[:, :, :, -1].transpose(0, 2, 1, 3).astype(cached_values.dtype)
        mixed = self.attend(query, keys, values, self_mask, cached_keys, cached_values, lengths)
        output = self.param("output", _weight_init, (c.hidden_size, c.num_heads * c.head_dim))
        return self.linear(mixed.reshape(batch, tokens, -1), output), KVCache(keys, values)


class GatedMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, eq. 6)."""

    config: BackboneConfig
    linear: Linear

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        # Stored as one matrix: a TPU copies a layer's slice of [2, F, D] before it can reshape it.
        weight = self.param("gate_up", _weight_init, (2 * c.intermediate_size, c.hidden_size))
        gate, up = jnp.split(self.linear(x, weight), 2, axis=-1)
        down = self.param("down", _weight_init, (c.hidden_size, c.intermediate_size))
        return self.linear(nn.silu(gate) * up, down)


class Layer(nn.Module):
    """Pre-norm transformer layer. Returns the layer's input too, for taps."""

    config: BackboneConfig
    linear: Linear
    attend: Attend

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        cached_keys: Float[Array, "B G S C"],
        cached_values: Float[Array, "B G S C"],
        rope: tuple[Array, Array],
        self_mask: Bool[Array, "#B T T"],
        lengths: RowInts,
    ) -> tuple[Float[Array, "B T D"], tuple[KVCache, Float[Array, "B T D"]]]:
        c = self.config
        normed = RMSNorm(c.norm_eps, name="attention_norm")(x)
        attention = Attention(c, self.linear, self.attend, name="attention")
        mixed, new = attention(normed, rope, self_mask, cached_keys, cached_values, lengths)
        middle = x + mixed
        normed = RMSNorm(c.norm_eps, name="mlp_norm")(middle)
        return middle + GatedMLP(c, self.linear, name="mlp")(normed), (new, x)


@functools.cache
def _layer_function(config: BackboneConfig, linear: Linear, attend: Attend) -> Callable[..., Any]:
    """One layer as a jitted function of its variables: traced once, however many layers call it.

    Tracing and lowering every unrolled layer anew would take most of a warm start.
    """
    return jax.jit(Layer(config, linear, attend, parent=None).apply)


class Transformer(nn.Module):
    """Token embedding, layers and final norm; ``logits`` apart, so that only the rows that need logits pay."""

    config: BackboneConfig
    linear: Linear = linear_highest
    attend: Attend = two_part_attention

    def setup(self) -> None:
        c = self.config
        # One table each; a tied model has no output matrix of its own and unembeds with the embedding.
        self.embed = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=_weight_init)
        if c.scan_layers:
            scanned = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                # One entry per argument; Flax declares the type of its default alone.
                in_axes=cast(Any, (0, 0, nn.broadcast, nn.broadcast, nn.broadcast)),
                length=c.num_layers,
            )
            self.layers = scanned(c, self.linear, self.attend)
        else:
            self.layer = [Layer(c, self.linear, self.attend) for _ in range(c.num_layers)]
        self.final_norm = RMSNorm(c.norm_eps)
        if not c.tie_embeddings:
            self.unembed = OutputMatrix(c)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        self_mask: Bool[Array, "#B T T"],
        cache: KVCache,
        lengths: RowInts,
    ) -> BackboneOutput:
        """Runs T new tokens of every row after the committed text.

        Args:
          tokens: ids; a negative id (an empty node of a tree) is read as 0 and must not be accepted.
          positions: absolute positions, 0-based; nodes of a tree may share one.
          self_mask: ``[i, j]`` is True where new token i may see new token j; an array, so a constant
            in a static branch and data elsewhere.
          cache: the committed text; read only.
          lengths: ``[B]`` committed slots of each row.
        """
        c = self.config
        x = jnp.take(self.embed.embedding, jnp.maximum(tokens, 0), axis=0).astype(jnp.float32)
        rope = rope_tables(rope_frequencies(c), positions)
        if c.scan_layers:
            keys, values = cast(tuple[Array, Array], (cache.keys, cache.values))  # stacked, so one array each
            x, (new, inputs) = self.layers(x, keys, values, rope, self_mask, lengths)
        else:
            layers, inputs = [], []
            for index, layer in enumerate(self.layer):
                arguments = (x, cache.keys[index], cache.values[index], rope, self_mask, lengths)
                if self.is_initializing():
                    x, (added, entry) = layer(*arguments)
                else:
                    x, (added, entry) = _layer_function(c, self.linear, self.attend)(layer.variables, *arguments)
                layers.append(added)
                inputs.append(entry)
            new = KVCache(tuple(a.keys for a in layers), tuple(a.values for a in layers))
        return BackboneOutput(hidden=x, normed=self.final_norm(x), taps=tuple(inputs[t] for t in c.taps), new=new)

    def logits(self, normed: Float[Array, "*any D"]) -> Float[Array, "*any V"]:
        """Logits over the whole vocabulary, float32."""
        return self.linear(normed, self.embed.embedding if self.config.tie_embeddings else self.unembed())


class OutputMatrix(nn.Module):
    """The output matrix of an untied model."""

    config: BackboneConfig

    @nn.compact
    def __call__(self) -> Float[Array, "V D"]:
        return self.param("kernel", _weight_init, (self.config.vocab_size, self.config.hidden_size))


def output_matrix(params: Params) -> Float[Array, "V D"]:
    """The matrix that turns normed hidden states into logits: its own, or the embedding when tied."""
    return params["unembed"]["kernel"] if "unembed" in params else params["embed"]["embedding"]


def stack_layers(params: Params, num_layers: int) -> Params:
    """Parameters of unrolled layers as those of scanned ones: one leading layer axis under ``layers``."""
    names = [f"layer_{i}" for i in range(num_layers)]
    rest = {name: value for name, value in params.items() if name not in names}
    return rest | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[n] for n in names))}


def unstack_layers(params: Params, num_layers: int) -> Params:
    """The inverse of ``stack_layers``."""
    rest = {name: value for name, value in params.items() if name != "layers"}
    return rest | {f"layer_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(num_layers)}


def build_backbone(
    config: BackboneConfig, *, linear: Linear = linear_highest, attend: Attend = two_part_attention
) -> Backbone:
    """The backbone of a config as pure functions; build it once, since two builds compile twice.

    Args:
      config: the shape.
      linear: the matrix product ``(x[..., in], weight[out, in]) -> [..., out]``; see ``precision``.
      attend: the attention function.
    """
    module = Transformer(config, linear, attend)

    def init(key: PRNGKey) -> Params:
        one = jnp.zeros((1, 1), jnp.int32)
        cache = init_cache(config, batch=1, slots=1, dtype=jnp.float32)

        def touch_all(module: Transformer) -> Array:
            return module.logits(module(one, one, causal_mask(1), cache, jnp.zeros(1, jnp.int32)).normed)

        return nn.init(touch_all, module)(key)["params"]

    def forward(
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        self_mask: Bool[Array, "#B T T"],
        cache: KVCache,
        lengths: RowInts,
    ) -> BackboneOutput:
        return cast(BackboneOutput, module.apply({"params": params}, tokens, positions, self_mask, cache, lengths))

    def unembed(params: Params, normed: Float[Array, "*any D"]) -> Float[Array, "*any V"]:
        return cast(Array, module.apply({"params": params}, normed, method="logits"))

    return Backbone(config=config, init=init, forward=forward, unembed=unembed)
