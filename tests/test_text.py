"""Tokenizers, chat templates and streaming, against transformers, plain Python and hand-worked tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from entmtp_jax.errors import UserError
from entmtp_jax.hub import DEFAULT_MODEL, cache_folder, resolve_model
from entmtp_jax.text import StreamDecoder, Text, load_text
from tests.checkpoint_files import sentencepiece_file, write_tokenizer_gguf

# Indented, with newlines after the tags: the environment must strip them as Hugging Face's does.
TEMPLATE = """{% if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
{% endif %}
{% for message in messages %}
    {% if loop.index > 9 %}
        {% continue %}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CORPUS = ["the cat and the hat and the mat", "system user assistant be kind", "it's 2024, isn't it? éé 🙂🙂 日本"] * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NUM_TOKENS = 310
SAMPLES = ["the cat", " the  cat\n\n12 and", "", "éa🙂 日本 isn't", "a<|im_end|>b", "\u2581x"]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A small byte-level BPE tokenizer with three control tokens, digits apart as in SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer) -> dict:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    types = [3 if token in SPECIAL else 1 for token in tokens]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": False}
    return ids | {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": types, "merges": merges}


@pytest.fixture(scope="module")
def text(trained, tmp_path_factory) -> Text:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return load_text(write_tokenizer_gguf(path, **byte_level_metadata(trained), chat_template=TEMPLATE))


@pytest.mark.parametrize("sample", SAMPLES)
def test_ids_of_a_gguf_file_are_those_of_the_tokenizer_it_was_made_from(text, trained, sample):
    assert text.encode(sample) == trained.encode(sample).ids
    plain = sample.replace("<|im_end|>", "")
    assert text.decode(text.encode(sample)) == plain


def test_special_tokens_of_a_gguf_file(text):
    assert (text.bos_id, text.eos_ids, text.has_chat_template, text.vocab_size) == (1, (2,), True, NUM_TOKENS)
    assert text.encode("<|im_start|>a")[0] == 1


def test_bos_is_added_when_the_file_says_so(trained, tmp_path):
    metadata = byte_level_metadata(trained) | {"add_bos_token": True}
    text = load_text(write_tokenizer_gguf(tmp_path / "model.gguf", **metadata, chat_template="{{ bos_token }}x"))
    assert text.encode("the") == [1, *trained.encode("the").ids]
    assert text.chat("the") == [1, *trained.encode("x").ids]


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    trained.save(str(tmp_path / "tokenizer.json"))
    settings_ = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return tmp_path


@pytest.mark.parametrize("system", [None, "Be terse.\n"])
@pytest.mark.parametrize("prompt", ["the cat", "  two\n\nlines <|im_end|> 12"])
def test_chat_is_that_of_transformers_from_either_source(folder, text, prompt, system):
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert load_text(folder).chat(prompt, system) == expected
    assert text.chat(prompt, system) == expected


def test_a_hugging_face_folder(folder):
    text = load_text(folder)
    assert (text.bos_id, text.eos_ids, text.vocab_size) == (1, (2, 0), NUM_TOKENS)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert load_text(folder).chat("the cat") == text.encode("the cat!")
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "the"}]
    changes = {"chat_template": named, "eos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(changes))
    text = load_text(folder)
    assert text.chat("hat") == text.encode("the")
    assert (text.bos_id, text.eos_ids) == (None, (0, 2))


def test_settings_of_a_training_run_in_the_file_are_ignored(trained, tmp_path):
    changed = Tokenizer.from_str(trained.to_str())
    changed.enable_truncation(2)
    changed.enable_padding(length=9)
    changed.save(str(tmp_path / "tokenizer.json"))
    assert load_text(tmp_path).encode("the cat and") == trained.encode("the cat and").ids


def test_without_a_template_chat_is_plain(trained, tmp_path):
    text = load_text(write_tokenizer_gguf(tmp_path / "model.gguf", **byte_level_metadata(trained)))
    assert not text.has_chat_template
    assert text.chat("the cat") == text.encode("the cat")
    assert text.chat("the cat", "be kind") == text.encode("be kind\n\nthe cat")


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system role') }}", "{% if %}", "{{ messages.clear() }}", "{{ messages[0].x.y }}"],
)
def test_a_template_that_fails_is_one_clear_line(trained, tmp_path, template):
    path = write_tokenizer_gguf(tmp_path / "model.gguf", **byte_level_metadata(trained), chat_template=template)
    with pytest.raises(UserError, match="model.gguf: the chat template cannot be applied .*; use --no-chat"):
        load_text(path).chat("hi")


PIECES = {
    "gpt-2": ["I", "'ll", "Ġpay", "Ġ1234", "Ġ", "Ġdollars", "!!", "Ċ", "Ċ", "ok"],
    "smollm": ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "Ġ", "Ġdollars", "!!", "Ċ", "Ċ", "ok"],
    "qwen2": ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "Ġ", "Ġdollars", "!!ĊĊ", "ok"],
    "llama-bpe": ["I", "'ll", "Ġpay", "Ġ", "123", "4", "Ġ", "Ġdollars", "!!ĊĊ", "ok"],
}


@pytest.mark.parametrize("name", PIECES)
def test_pre_tokenizers_cut_as_worked_by_hand(trained, tmp_path, name):
    """The published patterns applied by hand; ``Ġ`` is a space and ``Ċ`` a newline."""
    text = load_text(write_tokenizer_gguf(tmp_path / "model.gguf", **byte_level_metadata(trained) | {"pre": name}))
    cut = text.tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 1234  dollars!!\n\nok")
    assert [piece for piece, _ in cut] == PIECES[name]


REFUSED = {
    "pre-tokenizer": ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; supported: gpt-2, smollm"),
    "kind": ({"model": "rwkv"}, "tokenizer 'rwkv' is not supported"),
    "no vocabulary": ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges is missing"),
    "foreign merge": ({"merges": ["zq zq"]}, "merge 'zq zq' uses tokens that are not in the vocabulary"),
    "short types": ({"token_type": [1, 1]}, f"{NUM_TOKENS} tokens, but 2 token types"),
    "no scores": ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tokenizers_are_refused_by_name(trained, tmp_path, name):
    changes, message = REFUSED[name]
    path = write_tokenizer_gguf(tmp_path / "model.gguf", **byte_level_metadata(trained) | changes)
    with pytest.raises(UserError, match=message):
        load_text(path)


def test_folders_without_a_readable_tokenizer(tmp_path):
    with pytest.raises(UserError, match="neither tokenizer.json nor tokenizer.model"):
        load_text(tmp_path)
    for content in (b"{", b'{"model": 3}', b"\xff\xfe"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            load_text(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        load_text(tmp_path / "nothing")


# Streaming


@pytest.fixture(scope="module")
def sentencepiece_text(tmp_path_factory) -> Text:
    folder = tmp_path_factory.mktemp("vicuna")
    (folder / "tokenizer.model").write_bytes(sentencepiece_file())
    return load_text(folder)


def stream(text: Text, ids: list[int], sizes: list[int]) -> list[str]:
    """Pushes the ids in groups of the given sizes, then one by one."""
    decoder, pieces, position = StreamDecoder(text), [], 0
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(decoder.push(ids[position : position + size]))
        position += size
    return [*pieces, decoder.finish()]


def check_stream(text: Text, ids: list[int], sizes: list[int]) -> None:
    pieces = stream(text, ids, sizes)
    assert "".join(pieces) == text.decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


@given(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=25), st.lists(st.integers(0, 4), max_size=8))
@settings(deadline=None, max_examples=150)
def test_streamed_byte_level_text_is_the_decoded_text(text, ids, sizes):
    check_stream(text, ids, sizes)


# Byte tokens of the three characters é, 🙂 and space, words with spaces, control tokens and stray bytes.
# 280 lies beyond the vocabulary, as rows of a padded embedding do.
AWKWARD = [280, 0, 1, 2, 3, *[3 + byte for byte in "é🙂 ".encode()], 3 + 0xFF, *range(259, 271)]


@given(st.lists(st.sampled_from(AWKWARD), max_size=25), st.lists(st.integers(0, 4), max_size=8))
@settings(deadline=None, max_examples=300)
def test_streamed_sentencepiece_text_is_the_decoded_text(sentencepiece_text, ids, sizes):
    check_stream(sentencepiece_text, ids, sizes)


@given(st.text(alphabet="a é🙂日\n", min_size=1, max_size=12), st.lists(st.integers(0, 4), max_size=8))
@settings(deadline=None, max_examples=100)
def test_streamed_text_never_shows_half_a_character(text, sample, sizes):
    pieces = stream(text, text.encode(sample), sizes)
    assert "".join(pieces) == sample
    assert "\ufffd" not in "".join(pieces)


def test_an_emoji_comes_out_whole_as_in_the_docstring(text):
    decoder = StreamDecoder(text)
    letter, *emoji = text.tokenizer.encode("A").ids, *[[text.tokenizer.token_to_id(c)] for c in "ðŁĻĤ"]
    assert decoder.push(letter) == "A"
    assert [decoder.push(ids) for ids in emoji] == ["", "", "", "🙂"]
    assert decoder.finish() == ""


def test_bytes_that_are_no_character_come_out_at_the_end(text):
    decoder = StreamDecoder(text)
    assert decoder.push([text.tokenizer.token_to_id("ð")]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.push(text.encode("the")) == "the"


def test_user_defined_tokens_are_text(trained):
    trained = Tokenizer.from_str(trained.to_str())
    trained.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    text = Text(trained)
    check_stream(text, text.encode("a<tool é>🙂"), [])
    assert text.decode(text.encode("a<tool é>")) == "a<tool é>"


# Start-up and the default model


def test_loading_imports_no_heavy_library():
    """transformers, and through it torch, would add seconds to every start."""
    program = (
        "import sys, entmtp_jax.text, entmtp_jax.hub, entmtp_jax.checkpoints; "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub.hf_api') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
def test_the_default_model():
    text = load_text(resolve_model(DEFAULT_MODEL, cache_folder()))
    assert (text.bos_id, text.eos_ids, text.vocab_size, text.has_chat_template) == (1, (2,), 49152, True)
    turns = text.tokenizer.decode(text.chat("hi"), skip_special_tokens=False)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert turns == f"{system}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text.chat("hi")[-4:] == [1, 520, 9531, 198]
    assert text.chat("hi", "Be terse.")[0] == 1
    sample = "Café 🙂 日本\n\n12 apples"
    assert text.decode(text.encode(sample)) == sample
    check_stream(text, text.encode(sample), [])
