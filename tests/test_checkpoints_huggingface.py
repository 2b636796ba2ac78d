"""Hugging Face folders against the state dicts of random transformers models, whole and mutilated."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from entmtp_jax.checkpoints import load_backbone, load_config, tensors_from_params
from entmtp_jax.config import BackboneConfig, RopeScaling
from entmtp_jax.errors import UserError

SIZES: dict[str, Any] = dict(
    vocab_size=19,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
NO_GROUPS: dict[str, Any] = SIZES | {"num_key_value_heads": 4}
MODELS = {
    "llama_untied": transformers.LlamaConfig(**SIZES),
    "llama_tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=6),
    "llama_no_groups": transformers.LlamaConfig(**NO_GROUPS),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
}


def save_model(name: str, folder: Path, **options) -> dict[str, np.ndarray]:
    """Writes a random model; returns its state dict."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: transformers starts them at 0 and 1
            parameter.normal_()
    model.save_pretrained(folder, **options)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    if MODELS[name].tie_word_embeddings:
        state.pop("lm_head.weight")
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid untied Llama folder that tests then damage."""
    save_model("llama_untied", tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "absent"}))


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_that_of_transformers(name, tmp_path):
    state = save_model(name, tmp_path)
    config, params = load_backbone(tmp_path, "float32")
    tensors = tensors_from_params(config, params)
    assert tensors.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(tensors[key], value)
    # Without our own map: key head 1 of layer 1 is the last but one block of group 1.
    size = config.head_dim
    key_rows = state["model.layers.1.self_attn.k_proj.weight"][size : 2 * size]
    np.testing.assert_array_equal(params["layer_1"]["attention"]["qkv"][1, -2], key_rows)


@pytest.mark.parametrize("name", MODELS)
def test_config_is_that_of_transformers(name, tmp_path):
    save_model(name, tmp_path)
    theirs, config = MODELS[name], load_config(tmp_path)
    assert config == BackboneConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=6 if name == "llama_tied" else 4,
        rope_theta=10000.0,
        norm_eps=theirs.rms_norm_eps,
        qkv_bias=name == "qwen2",
        tie_embeddings=theirs.tie_word_embeddings,
        max_positions=64,
        bos_id=theirs.bos_token_id,
        eos_ids=() if theirs.eos_token_id is None else (theirs.eos_token_id,),
    )


def test_sharded_safetensors(tmp_path):
    state = save_model("llama_untied", tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config, params = load_backbone(tmp_path, "float32")
    for key, value in tensors_from_params(config, params).items():
        np.testing.assert_array_equal(value, state[key])


@pytest.mark.parametrize("shards", [1, 3])
def test_torch_files(folder, shards):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"pytorch_model-{i % shards + 1:05}-of-{shards:05}.bin" for i, name in enumerate(names)}
    if shards == 1:
        places = dict.fromkeys(names, "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for file in set(places.values()):
        part = {name: torch.from_numpy(tensors[name]) for name in names if places[name] == file}
        torch.save(part, folder / file)
    config, params = load_backbone(folder, "float32")
    for key, value in tensors_from_params(config, params).items():
        np.testing.assert_array_equal(value, tensors[key])


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_files(folder, stored):
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[stored]
    edit_tensors(folder, lambda tensors: tensors.update({key: x.astype(kind) for key, x in tensors.items()}))
    written = load_file(folder / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        config, params = load_backbone(folder, dtype)
        for key, value in tensors_from_params(config, params).items():
            expected = written[key].astype(value.dtype)
            np.testing.assert_array_equal(value.astype(np.float32), expected.astype(np.float32))
            assert value.dtype == np.dtype(np.float32 if "norm" in key or dtype == "float32" else ml_dtypes.bfloat16)


ROPE_VARIANTS = {
    "old linear": (
        {"rope_parameters": "absent", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        (5e5, RopeScaling(kind="linear", factor=4.0)),
    ),
    "old none": ({"rope_parameters": "absent", "rope_theta": 7.0, "rope_scaling": None}, (7.0, RopeScaling())),
    "old default": ({"rope_parameters": "absent", "rope_scaling": {"rope_type": "default"}}, (1e4, RopeScaling())),
    "new": ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, (9.0, RopeScaling())),
    "new llama3": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        (5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
    ),
}


@pytest.mark.parametrize("name", ROPE_VARIANTS)
def test_both_spellings_of_rope(folder, name):
    changes, expected = ROPE_VARIANTS[name]
    edit_config(folder, **changes)
    config = load_config(folder)
    assert (config.rope_theta, config.rope_scaling) == expected


def test_defaults_of_a_terse_config(folder):
    edit_config(folder, rms_norm_eps="absent", num_key_value_heads=None, head_dim=None, tie_word_embeddings="absent")
    config = load_config(folder)
    assert (config.norm_eps, config.num_kv_heads, config.head_dim, config.tie_embeddings) == (1e-6, 4, 4, False)
    edit_config(folder, model_type="qwen2", num_key_value_heads="absent")
    with pytest.raises(UserError, match="'num_key_value_heads' must be a number"):
        load_config(folder)


def test_end_tokens_of_both_files(folder):
    edit_config(folder, eos_token_id=[5, 2], bos_token_id=None)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert load_config(folder).eos_ids == (5, 2, 9)
    assert load_config(folder).bos_id is None
    (folder / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(UserError, match="generation_config.json: token ids must be integers, got 'two'"):
        load_config(folder)


REFUSED = {
    "family mixtral": ({"model_type": "mixtral"}, "'mixtral' is not supported: it is a mixture of experts"),
    "family qwen3": ({"model_type": "qwen3"}, "normalises queries and keys"),
    "family qwen3_moe": ({"model_type": "qwen3_moe"}, "mixture of experts"),
    "family gemma3": ({"model_type": "gemma3_text"}, "norms, activation and embedding scale"),
    "family unknown": ({"model_type": "zebra"}, "'zebra' is not supported: it is not known here; supported: llama"),
    "no family": ({"model_type": "absent"}, "family None"),
    "sliding window": ({"model_type": "mistral", "sliding_window": 16}, r"sliding-window attention \(16 tokens\)"),
    "silent window": ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding-window"),
    "window in qwen2": ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "sliding-window"),
    "windowed layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    "attention bias": ({"attention_bias": True}, "attention_bias is not supported"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is not supported"),
    "activation": ({"hidden_act": "gelu"}, "activation 'gelu'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised safetensors"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn' is not supported"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "part of each head"),
    "factor missing": ({"rope_parameters": {"rope_type": "linear"}}, "'factor' must be a number"),
    "wrong type": ({"hidden_size": "16"}, "'hidden_size' must be a number, got '16'"),
    "negative": ({"num_hidden_layers": -1}, "positive integer, got -1"),
    "odd head": ({"head_dim": 3}, "head_dim 3 is odd"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_maths_is_refused_in_one_line(folder, name):
    changes, message = REFUSED[name]
    edit_config(folder, **changes)
    with pytest.raises(UserError, match=message) as caught:
        load_config(folder)
    assert "\n" not in str(caught.value)


def test_a_window_as_long_as_the_context_is_no_window(folder):
    edit_config(folder, model_type="mistral", sliding_window=64)
    assert load_config(folder).max_positions == 64


DAMAGE = {
    "dropped tensor": (
        lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")),
        r"tensor model.norm.weight of shape \(16,\) is missing",
    ),
    "renamed tensor": (
        lambda f: edit_tensors(f, lambda t: t.update(other=t.pop("lm_head.weight"))),
        "tensor lm_head.weight of shape .* is missing",
    ),
    "integer tensor": (
        lambda f: edit_tensors(f, lambda t: t.update({"lm_head.weight": np.zeros((19, 16), np.int64)})),
        "tensor 'lm_head.weight' has dtype I64",
    ),
    "config of another size": (lambda f: edit_config(f, vocab_size=20), r"embed_tokens.weight has shape \(19, 16\)"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-7]),
        "model.safetensors is truncated or no safetensors file",
    ),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"hello, world"), "no safetensors file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor pytorch_model.bin"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "does not hold an object"),
    "no folder": (shutil.rmtree, "does not exist"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_in_one_line(folder, name):
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_backbone(folder, "float32")
    assert "\n" not in str(caught.value)


def test_damaged_shard_lists(folder):
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    for content, message in [
        ({"weight_map": {}}, "has no 'weight_map'"),
        ({"weight_map": {"a": "model-1.safetensors"}}, "names 'model-1.safetensors', which is missing"),
        ({"weight_map": {"a": "../config.json"}}, "no weight file of this folder"),
        ({"weight_map": {"a": "model.safetensors", "b": "copy.safetensors"}}, "is both in copy.safetensors and in"),
    ]:
        shutil.copy(single, folder / "copy.safetensors")
        index.write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            load_backbone(folder, "float32")


def test_a_folder_of_gguf_files_says_what_to_pass(tmp_path):
    (tmp_path / "model.Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="pass the file model.Q4_0.gguf in it"):
        load_config(tmp_path)
