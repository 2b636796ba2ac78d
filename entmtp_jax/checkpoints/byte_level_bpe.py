"""Byte-level BPE tokenizers (GPT-2 style) from vocabulary, merges and the name of the pre-tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from entmtp_jax.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types, as SentencePiece counts them

_SPLIT_BEFORE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPLIT_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """How a text is cut before the merges.

    Attributes:
      cut: step before the bytes are mapped to characters; None: the GPT-2 pattern alone.
      normalise: whether Unicode is composed (NFC) first.
      ignore_merges: a piece that is in the vocabulary stays whole, whatever the merges say.
      gpt2_pattern: whether the GPT-2 pattern cuts too.
    """

    cut: pre_tokenizers.PreTokenizer | None
    normalise: bool = False
    ignore_merges: bool = False
    gpt2_pattern: bool = True


def _pattern(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(_SPLIT_BEFORE_DIGITS + digits + _SPLIT_AFTER_DIGITS), behavior="isolated")


def _pre_tokenizers() -> dict[str, PreTokenizer]:
    """Pre-tokenizers by the names that GGUF files give them."""
    qwen2 = PreTokenizer(_pattern(r"\p{N}"), normalise=True, gpt2_pattern=False)
    llama3 = PreTokenizer(_pattern(r"\p{N}{1,3}"), ignore_merges=True, gpt2_pattern=False)
    return {
        "gpt-2": PreTokenizer(None),
        "smollm": PreTokenizer(pre_tokenizers.Digits(individual_digits=True)),
        "qwen2": qwen2,
        "deepseek-r1-qwen": qwen2,
        "llama-bpe": llama3,
        "llama3": llama3,
    }


def build_byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], pre_tokenizer: str, where: str
) -> Tokenizer:
    """Builds a byte-level BPE tokenizer.

    Args:
      tokens: vocabulary in the order of the ids, bytes written as GPT-2's printable characters.
      merges: pairs joined by one space, first merge first.
      types: type of each token; control and user-defined tokens are cut out of the text before anything else.
      pre_tokenizer: its name in GGUF files, such as "smollm".
      where: file, for messages.

    Returns:
      A tokenizer that adds no special tokens.

    Raises:
      UserError: the pre-tokenizer is not known, or the merges do not fit the vocabulary.
    """
    known = _pre_tokenizers()
    if pre_tokenizer not in known:
        raise UserError(
            f"{where}: pre-tokenizer {pre_tokenizer!r} is not supported; supported: {', '.join(known)}. "
            "Use the model's Hugging Face folder"
        )
    rule = known[pre_tokenizer]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        first, _, second = merge.partition(" ")
        pairs.append((first, second))
        if not {first, second, first + second} <= vocabulary.keys():
            raise UserError(f"{where}: merge {merge!r} uses tokens that are not in the vocabulary")
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=rule.ignore_merges))
    if rule.normalise:
        tokenizer.normalizer = normalizers.NFC()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2_pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([rule.cut, to_bytes]) if rule.cut else to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    add_special_tokens(tokenizer, tokens, types)
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Marks control and user-defined tokens, which are never split; control tokens are left out of decoded text."""
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in marked])


def add_bos(tokenizer: Tokenizer, token: str, token_id: int) -> None:
    """Lets ``encode`` begin every text with a token."""
    tokenizer.post_processor = processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, token_id)])
