"""A tiny random backbone whose greedy text is varied and free of near-ties."""

import jax
import jax.numpy as jnp

from entmtp_jax.backbone.transformer import Backbone, build_backbone
from entmtp_jax.config import BackboneConfig
from entmtp_jax.types import Params

TINY_CONFIG = BackboneConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=512,
)


def tiny_backbone(seed: int = 0, config: BackboneConfig = TINY_CONFIG) -> tuple[Backbone, Params]:
    """A random model; its weights are scaled up, so that attention and entropies vary along the text."""
    backbone = build_backbone(config)
    params = backbone.init(jax.random.key(seed))

    def scale(path: tuple, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return leaf if "norm" in name else leaf * (30.0 if "embedding" in name else 12.0)

    return backbone, jax.tree_util.tree_map_with_path(scale, jax.tree.map(jnp.asarray, params))
