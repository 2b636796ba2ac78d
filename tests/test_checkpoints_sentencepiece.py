"""SentencePiece tokenizers against the rule in plain Python, from either kind of file."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.checkpoints.sentencepiece_bpe import Pieces, ranked_merges, read_sentencepiece_model
from entmtp_jax.errors import UserError
from entmtp_jax.text import Text, load_text
from tests.checkpoint_files import PIECE_SCORES, TOKENS, TYPES, sentencepiece_file, write_tokenizer_gguf


def plain_sentencepiece(text: str) -> list[int]:
    """SentencePiece's rule in its plainest form: join the best pair, leftmost first, until none is left."""
    symbols = list(("\u2581" + text).replace(" ", "\u2581")) if text else []
    score = {token: s for token, s, k in zip(TOKENS, PIECE_SCORES, TYPES, strict=True) if k == 1}
    while True:
        pairs = [
            (-score[a + b], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False)) if a + b in score
        ]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        known = symbol in score
        ids += [TOKENS.index(symbol)] if known else [TOKENS.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return ids


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vicuna")
    (folder / "tokenizer.model").write_bytes(sentencepiece_file())
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "add_bos_token": true}')
    return folder


@pytest.fixture(scope="module")
def sentencepiece_text(sentencepiece_folder) -> Text:
    return load_text(sentencepiece_folder)


@given(st.text(alphabet="abc é\n🙂", max_size=12))
@settings(deadline=None, max_examples=150)
def test_sentencepiece_joins_the_best_pair_first(sentencepiece_text, sample):
    text = sentencepiece_text
    assert text.encode(sample) == [1, *plain_sentencepiece(sample)]
    assert text.decode(text.encode(sample)) == sample


def test_sentencepiece_from_a_gguf_file_is_the_same(sentencepiece_text, tmp_path):
    path = write_tokenizer_gguf(
        tmp_path / "model.gguf",
        model="llama",
        tokens=TOKENS,
        scores=PIECE_SCORES,
        token_type=TYPES,
        bos_token_id=1,
        eos_token_id=2,
        eot_token_id=270,
    )
    text, other = load_text(path), sentencepiece_text
    assert (text.bos_id, text.eos_ids, other.bos_id, other.eos_ids) == (1, (2, 270), 1, (2,))
    for sample in ["ab abc", "  abé🙂", "a<|user|>b</s>c"]:
        assert text.encode(sample) == other.encode(sample)
    assert text.encode("a<|user|>")[-1] == 270
    assert text.decode([1, 265, 2, 270]) == "a<|user|>"


def test_ranked_merges_as_in_the_docstring():
    pieces = Pieces(["a", "b", "c", "ab", "bc", "abc"], [0.0, 0.0, 0.0, -1.0, -2.0, -3.0], [1] * 6, True)
    assert ranked_merges(pieces) == [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]


def test_tokens_added_after_training_keep_their_ids(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": len(TOKENS), "<s>": 1}))
    assert load_text(tmp_path).encode("a<pad>")[-1] == len(TOKENS)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": len(TOKENS) + 4}))
    with pytest.raises(UserError, match=f"added token '<pad>' should have id {len(TOKENS) + 4}"):
        load_text(tmp_path)
    (tmp_path / "added_tokens.json").unlink()
    for listed, message in [({"1": 2}, "list of added tokens is damaged"), ({"999": {"content": "<x>"}}, "id 999")]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
        with pytest.raises(UserError, match=message):
            load_text(tmp_path)


@pytest.mark.parametrize("options", [{"kind": 1}, {"charsmap": b"map"}, {"trim": 1}])
def test_other_sentencepiece_models_are_refused(tmp_path, options):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(**options))
    with pytest.raises(UserError, match="not a plain BPE model"):
        read_sentencepiece_model(tmp_path / "tokenizer.model")


@given(st.integers(0, 4000))
@settings(deadline=None, max_examples=40)
def test_a_cut_sentencepiece_model_gives_no_other_error(tmp_path_factory, end):
    path = tmp_path_factory.mktemp("cut") / "tokenizer.model"
    path.write_bytes(sentencepiece_file()[:end])
    with pytest.raises(UserError, match="damaged|plain BPE"):
        read_sentencepiece_model(path)
