"""Finds tokenizer, chat template and special tokens of a checkpoint: GGUF metadata or a Hugging Face folder.

``transformers`` could do it too, but reads a GGUF vocabulary in half a minute, guesses its pre-tokenizer
and imports torch where that is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from entmtp_jax.checkpoints.byte_level_bpe import add_bos, build_byte_level_bpe
from entmtp_jax.checkpoints.gguf_container import GGUFFile, read_gguf
from entmtp_jax.checkpoints.huggingface_config import end_tokens
from entmtp_jax.checkpoints.sentencepiece_bpe import Pieces, build_sentencepiece_bpe, read_sentencepiece_model
from entmtp_jax.errors import UserError
from entmtp_jax.json_files import read_json

SPECIAL_TOKENS = ("bos", "eos", "unk", "pad")
GGUF_NAMES = {"unk": "unknown", "pad": "padding"}  # where GGUF's names of the special tokens differ


class TokenizerParts(NamedTuple):
    """What a checkpoint says about text.

    Attributes:
      where: file or folder, for messages.
      tokenizer: adds the special tokens that the model expects around a plain text.
      template: Jinja source of the chat template, or None.
      special_tokens: texts of the special tokens by their names in templates, such as "bos_token".
      eos_ids: tokens that end a text.
    """

    where: str
    tokenizer: Tokenizer
    template: str | None
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]


def read_tokenizer(source: Path) -> TokenizerParts:
    """Reads what a checkpoint says about text.

    Args:
      source: a Hugging Face folder or a GGUF file.

    Raises:
      UserError: no tokenizer there, a kind that is not supported, or a damaged file.
    """
    if not source.exists():
        raise UserError(f"{source} does not exist; pass a Hugging Face folder or a .gguf file")
    return _from_folder(source) if source.is_dir() else _from_gguf(read_gguf(source))


def _from_gguf(file: GGUFFile) -> TokenizerParts:
    tokens = _typed_list(file, "tokens", str)
    tokenizer = _gguf_tokenizer(file, tokens)
    ids = {name: file.metadata.get(f"tokenizer.ggml.{GGUF_NAMES.get(name, name)}_token_id") for name in SPECIAL_TOKENS}
    named = {name: index for name, index in ids.items() if isinstance(index, int) and 0 <= index < len(tokens)}
    if "bos" in named and file.metadata.get("tokenizer.ggml.add_bos_token", _adds_bos_unasked(file)):
        add_bos(tokenizer, tokens[named["bos"]], named["bos"])
    ends = [named.get("eos"), file.metadata.get("tokenizer.ggml.eot_token_id")]
    template = file.metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        where=str(file.path),
        tokenizer=tokenizer,
        template=template if isinstance(template, str) else None,
        special_tokens={f"{name}_token": tokens[index] for name, index in named.items()},
        eos_ids=tuple(dict.fromkeys(index for index in ends if isinstance(index, int))),
    )


def _gguf_tokenizer(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    kind = file.metadata.get("tokenizer.ggml.model")
    types = _typed_list(file, "token_type", int)
    if len(types) != len(tokens):
        raise UserError(f"{file.path}: {len(tokens)} tokens, but {len(types)} token types; the file is damaged")
    if kind == "gpt2":
        pre_tokenizer = str(file.metadata.get("tokenizer.ggml.pre", "default"))
        return build_byte_level_bpe(tokens, _typed_list(file, "merges", str), types, pre_tokenizer, str(file.path))
    if kind == "llama":
        prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
        return build_sentencepiece_bpe(Pieces(tokens, _typed_list(file, "scores", float), types, prefix))
    raise UserError(f"{file.path}: tokenizer {kind!r} is not supported; supported: gpt2, llama")


def _typed_list(file: GGUFFile, key: str, kind: type) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise UserError(f"{file.path}: metadata tokenizer.ggml.{key} is missing or damaged")
    return values


def _adds_bos_unasked(file: GGUFFile) -> bool:
    """Whether a file that does not say so wants a BOS token: SentencePiece and Llama 3 do."""
    keys = file.metadata
    return keys.get("tokenizer.ggml.model") == "llama" or keys.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")


def _from_folder(folder: Path) -> TokenizerParts:
    settings = _object(folder / "special_tokens_map.json") | _object(folder / "tokenizer_config.json")
    texts = {f"{name}_token": _token_text(settings.get(f"{name}_token")) for name in SPECIAL_TOKENS}
    special_tokens = {name: text for name, text in texts.items() if text is not None}
    tokenizer = _folder_tokenizer(folder, settings, special_tokens.get("bos_token"))
    eos = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    ends = (() if eos is None else (eos,)) + end_tokens(folder)
    return TokenizerParts(
        str(folder), tokenizer, _folder_template(folder, settings), special_tokens, tuple(dict.fromkeys(ends))
    )


def _folder_tokenizer(folder: Path, settings: dict[str, Any], bos: str | None) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return _parse_tokenizer(folder / "tokenizer.json")
    if not (folder / "tokenizer.model").is_file():
        raise UserError(f"{folder} has neither tokenizer.json nor tokenizer.model; is it downloaded whole?")
    tokenizer = build_sentencepiece_bpe(read_sentencepiece_model(folder / "tokenizer.model"))
    _add_listed_tokens(tokenizer, folder, settings)
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    if bos is not None and bos_id is not None and settings.get("add_bos_token", True):
        add_bos(tokenizer, bos, bos_id)
    return tokenizer


def _parse_tokenizer(path: Path) -> Tokenizer:
    text = _read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path} is damaged or of another version: {error}") from None
    # The file may hold the settings of the last training run, which would cut or fill prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _add_listed_tokens(tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
    """Tokens added after the SentencePiece model was trained; each must get the id that the folder gives it."""
    listed: dict[int, AddedToken] = {}
    try:
        for index, entry in settings.get("added_tokens_decoder", {}).items():
            special = bool(entry.get("special", False))
            listed[int(index)] = AddedToken(entry["content"], special=special, normalized=False)
        for token, index in _object(folder / "added_tokens.json").items():
            listed.setdefault(int(index), AddedToken(token, special=False, normalized=False))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{folder}: the list of added tokens is damaged; provide a tokenizer.json") from None
    for index, added in sorted(listed.items()):
        token = added.content
        tokenizer.add_tokens([added])
        if tokenizer.token_to_id(token) != index:
            raise UserError(
                f"{folder}: added token {token!r} should have id {index}, but the vocabulary gives it "
                f"{tokenizer.token_to_id(token)}; provide a tokenizer.json"
            )


def _folder_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: its own file (newer), or inside tokenizer_config.json, alone or in a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file does not exist."""
    data = read_json(path) if path.is_file() else {}
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold an object; fetch it again")
    return data


def _token_text(value: Any) -> str | None:
    """A special token is written as text or as an object with ``content``."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
