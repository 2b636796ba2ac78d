"""A decoder with no cache, no tree and no JAX: NumPy, one full pass over the prefix per token.

It shares no code with the package's backbone or loop, so equality with it means something.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from entmtp_jax.config import BackboneConfig
from entmtp_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Reference:
    """Text that plain decoding writes.

    Attributes:
      tokens: new tokens, EOS included.
      finish_reason: ``eos``, ``length`` or ``cache``.
      margins: of each new token, the difference of the two largest logits.
    """

    tokens: list[int]
    finish_reason: str
    margins: list[float]


def reference_logits(config: BackboneConfig, params: Params, tokens: Sequence[int]) -> np.ndarray:
    """Logits after every token of one sequence, ``[T, V]`` float64."""
    weights = _float64(params)
    x = weights["embed"]["embedding"][np.asarray(tokens)]
    for index in range(config.num_layers):
        x = reference_layer(config, weights[f"layer_{index}"], x)
    x = reference_norm(config, weights["final_norm"], x)
    output = weights["embed"]["embedding"] if config.tie_embeddings else weights["unembed"]["kernel"]
    return x @ output.T


def reference_layer(config: BackboneConfig, layer: Params, x: np.ndarray) -> np.ndarray:
    """One layer over a whole sequence ``[T, D]``; each position, from 0 on, sees itself and those before."""
    layer = _float64(layer)
    angles = np.arange(len(x))[:, None] * _frequencies(config)
    cosines, sines = np.cos(angles)[:, None], np.sin(angles)[:, None]
    allowed = np.tril(np.ones((len(x), len(x)), bool))
    normed = reference_norm(config, layer["attention_norm"], x)
    x = x + _attention(config, layer["attention"], normed, cosines, sines, allowed)
    gate, up = np.split(layer["mlp"]["gate_up"] @ reference_norm(config, layer["mlp_norm"], x).T, 2)
    return x + ((gate / (1 + np.exp(-gate))) * up).T @ layer["mlp"]["down"].T


def reference_norm(config: BackboneConfig, weights: Params, x: np.ndarray) -> np.ndarray:
    """RMSNorm over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weights["scale"]


def reference_decode(
    config: BackboneConfig,
    params: Params,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    capacity: int | None = None,
) -> Reference:
    """Greedy decoding of one prompt; ``capacity`` slots hold every token but the last."""
    text, margins = list(prompt), []
    while True:
        if len(margins) == max_new_tokens:
            return Reference(text[len(prompt) :], "length", margins)
        if capacity is not None and len(text) > capacity:
            return Reference(text[len(prompt) :], "cache", margins)
        logits = reference_logits(config, params, text)[-1]
        second, first = np.sort(logits)[-2:]
        text.append(int(np.argmax(logits)))
        margins.append(float(first - second))
        if text[-1] in eos_ids:
            return Reference(text[len(prompt) :], "eos", margins)


def _attention(
    config: BackboneConfig,
    weights: dict[str, np.ndarray],
    x: np.ndarray,
    cosines: np.ndarray,
    sines: np.ndarray,
    allowed: np.ndarray,
) -> np.ndarray:
    projected = np.einsum("td,gjcd->tgjc", x, weights["qkv"])
    if "qkv_bias" in weights:
        projected = projected + weights["qkv_bias"]
    mixed = []
    for group in range(config.num_kv_heads):
        key = _rotate(projected[:, group, -2:-1], cosines, sines)[:, 0]
        value = projected[:, group, -1]
        for query in _rotate(projected[:, group, :-2], cosines, sines).transpose(1, 0, 2):
            scores = np.where(allowed, query @ key.T / np.sqrt(config.head_dim), -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(scores / scores.sum(-1, keepdims=True) @ value)
    return np.concatenate(mixed, axis=-1) @ weights["output"].T


def _rotate(heads: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> np.ndarray:
    half = heads.shape[-1] // 2
    turned = np.concatenate([-heads[..., half:], heads[..., :half]], axis=-1)
    return heads * np.concatenate([cosines] * 2, -1) + turned * np.concatenate([sines] * 2, -1)


def _frequencies(config: BackboneConfig) -> np.ndarray:
    frequencies = 1.0 / config.rope_theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    if config.rope_scaling.kind == "linear":
        return frequencies / config.rope_scaling.factor
    if config.rope_scaling.kind != "none":
        raise ValueError(f"the reference knows no RoPE scaling {config.rope_scaling.kind!r}")
    return frequencies


def _float64(params: Params) -> Params:
    if isinstance(params, dict):
        return {name: _float64(value) for name, value in params.items()}
    return np.asarray(params).astype(np.float64)
