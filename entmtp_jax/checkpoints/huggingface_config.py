"""Translates the config.json of a Hugging Face folder; whatever would change the maths is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from entmtp_jax.config import ROPE_KINDS, BackboneConfig, RopeScaling
from entmtp_jax.errors import UserError
from entmtp_jax.json_files import read_json

# What transformers assumes where a config.json is silent; None: the file must say it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
}
EXPERTS = "it is a mixture of experts"
QUERY_NORM = "it normalises queries and keys"
# Well-known families whose arithmetic differs, by prefix of model_type; the longest prefix decides.
REASONS = {
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3": QUERY_NORM,
    "qwen3_moe": EXPERTS,
    "qwen3_next": "it mixes linear attention with attention",
    "deepseek": "it has latent attention and a mixture of experts",
    "llama4": EXPERTS,
    "gemma": "its norms, activation and embedding scale differ",
    "phi": "its projections are fused or its rotary embedding covers a part of each head",
    "smollm3": "some of its layers have no rotary embedding",
    "granite": "it scales embeddings, attention and logits",
    "olmo": "its norms are placed differently",
    "cohere": "its blocks are parallel and its norms differ",
    "gpt2": "it has learned positions and LayerNorm",
    "gpt_neox": "it has parallel blocks and LayerNorm",
    "gpt_oss": EXPERTS,
    "falcon": "it has parallel blocks and LayerNorm",
    "mamba": "it is a state-space model",
}


class _Fields(NamedTuple):
    """A parsed config.json with its path, for messages, and the defaults of its family."""

    path: Path
    data: dict[str, Any]
    defaults: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """The value; a key that is absent or null gives the family's default, then ``default``."""
        if key in self.data:
            value = self.data[key]
            return default if value is None else value
        return self.defaults.get(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{self.path}: key {key!r} must be a number, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{self.path}: key {key!r} must be a positive integer, got {value!r}")
        return value


def load_huggingface_config(folder: Path) -> BackboneConfig:
    """Reads ``config.json`` (and the end tokens of ``generation_config.json``).

    Args:
      folder: a Hugging Face model folder.

    Returns:
      The backbone's config, layers unrolled.

    Raises:
      UserError: no config, a family or an option that is not supported (named), or a value of the wrong type.
    """
    fields = _read_fields(folder)
    _refuse_other_maths(fields)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    # Only Llama's default is certain; the other families default to numbers that fit one of their models.
    kv_heads = fields.count("num_key_value_heads", heads if fields.data["model_type"] == "llama" else None)
    theta, scaling = _rope(fields)
    return BackboneConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.count("head_dim", hidden // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.number("rms_norm_eps"),
        qkv_bias=fields.data["model_type"] == "qwen2",
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_positions=fields.count("max_position_embeddings"),
        bos_id=next(iter(token_ids(fields.get("bos_token_id"), fields.path)), None),
        eos_ids=end_tokens(folder),
    )


def _read_fields(folder: Path) -> _Fields:
    path = folder / "config.json"
    if not path.is_file():
        packed = sorted(folder.glob("*.gguf"))
        advice = f"pass the file {packed[0].name} in it" if packed else "it must be a Hugging Face model folder"
        raise UserError(f"{folder} has no config.json; {advice}")
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold an object; is it the model's config?")
    family = data.get("model_type")
    if family not in DEFAULTS:
        prefixes = [prefix for prefix in REASONS if isinstance(family, str) and family.startswith(prefix)]
        reason = REASONS[max(prefixes, key=len)] if prefixes else "it is not known here"
        raise UserError(f"{path}: model family {family!r} is not supported: {reason}; supported: {', '.join(DEFAULTS)}")
    return _Fields(path, data, DEFAULTS[family])


def _refuse_other_maths(fields: _Fields) -> None:
    """Refuses options under which the model is not the decoder implemented here."""
    path, get = fields.path, fields.get
    if get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"{path}: activation {get('hidden_act')!r} is not supported, only 'silu'")
    for option in ("attention_bias", "mlp_bias"):
        if get(option, False):
            raise UserError(f"{path}: {option} is not supported (biases beyond query, key and value)")
    if get("quantization_config"):
        raise UserError(f"{path}: quantised safetensors are not supported; use the original weights or a GGUF file")
    windowed = get("use_sliding_window", False) if fields.data["model_type"] == "qwen2" else True
    window = get("sliding_window")
    if windowed and window is not None and window < fields.count("max_position_embeddings"):
        raise UserError(f"{path}: sliding-window attention ({window} tokens) is not supported")
    if "sliding_attention" in get("layer_types", []):
        raise UserError(f"{path}: layers with sliding-window attention are not supported")


def _rope(fields: _Fields) -> tuple[float, RopeScaling]:
    """Base and scaling from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    options = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(options, dict):
        raise UserError(f"{fields.path}: the RoPE parameters must be an object, got {options!r}")
    rope = _Fields(fields.path, options, {})
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UserError(f"{fields.path}: rotary embedding of a part of each head ({partial}) is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "none" if kind == "default" else kind
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise UserError(f"{fields.path}: RoPE scaling {kind!r} is not supported; supported: {known}")
    if kind == "none":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.number("factor"))
    return theta, RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.count("original_max_position_embeddings", fields.count("max_position_embeddings")),
    )


def token_ids(value: Any, path: Path) -> tuple[int, ...]:
    """Token ids given as nothing, one id or a list of ids.

    Raises:
      UserError: anything else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(f"{path}: token ids must be integers, got {value!r}")
    return tuple(ids)


def end_tokens(folder: Path) -> tuple[int, ...]:
    """End tokens of config.json and generation_config.json, where these exist.

    Chat models often name the end of a turn in the generation config only.
    """
    ids: tuple[int, ...] = ()
    for path in (folder / "config.json", folder / "generation_config.json"):
        data = read_json(path) if path.is_file() else None
        if isinstance(data, dict):
            ids += token_ids(data.get("eos_token_id"), path)
    return tuple(dict.fromkeys(ids))
