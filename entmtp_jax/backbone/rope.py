"""Rotary position embeddings in the half-split convention of Hugging Face's Llama.

Channel c of the first half is rotated with channel c + C/2 of the second half by the angle
``position * frequency[c]``; GGUF files store the interleaved convention and are permuted on load.
"""

import math

import jax.numpy as jnp
import numpy as np

from entmtp_jax.config import BackboneConfig, RopeScaling
from entmtp_jax.types import Array, Float, Int


def rope_frequencies(config: BackboneConfig) -> np.ndarray:
    """Angular frequency of each channel pair, in radians per position.

    ``theta ** (-2 c / C)`` (RoFormer, 3.2.2), rescaled as ``config.rope_scaling`` says.

    Returns:
      float32 array of shape ``[C / 2]``.
    """
    channels = np.arange(0, config.head_dim, 2, dtype=np.float64)
    frequencies = config.rope_theta ** (-channels / config.head_dim)
    return _rescale(frequencies, config.rope_scaling).astype(np.float32)


def _rescale(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: a frequency whose wavelength fits often into the original context is kept, one that does
    # not fit is divided by the factor, and those between are blended linearly in turns per context.
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_tables(
    frequencies: np.ndarray, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosines and sines of the rotation at each position, float32."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    heads: Float[Array, "B T X C"], cosines: Float[Array, "B T half"], sines: Float[Array, "B T half"]
) -> Float[Array, "B T X C"]:
    """Rotates every head of every token to its position."""
    first, second = jnp.split(heads, 2, axis=-1)
    cosines, sines = cosines[:, :, None], sines[:, :, None]
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
