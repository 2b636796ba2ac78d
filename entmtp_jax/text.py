"""Text in, token ids out, and back: plain, through the chat template, and piecewise while tokens arrive."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from entmtp_jax.checkpoints.chat_template import render_chat
from entmtp_jax.checkpoints.tokenizer_files import TokenizerParts, read_tokenizer

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclasses.dataclass(frozen=True)
class Text:
    """A model's tokenizer and chat template.

    Attributes:
      tokenizer: of the ``tokenizers`` library.
      template: Jinja source, or None.
      special_tokens: texts of the special tokens by name, for the template.
      bos_id: token that begins a text, or None.
      eos_ids: tokens that end a text.
      where: file or folder it was read from, for messages.
    """

    tokenizer: Tokenizer
    template: str | None = None
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    where: str = "tokenizer"

    @property
    def has_chat_template(self) -> bool:
        """Whether ``chat`` differs from ``encode``."""
        return self.template is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the model's embedding may have more rows."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens that the tokenizer itself adds (BOS for Llama)."""
        return self.tokenizer.encode(text).ids

    def chat(self, prompt: str, system: str | None = None) -> list[int]:
        """Token ids of one user turn, up to where the assistant's answer begins.

        Args:
          prompt: the user's text.
          system: system message; None leaves it to the template, which may have its own.

        Returns:
          Ids; those of the plain prompt (after the system message, if any) where the model has no template.

        Raises:
          UserError: the template refuses these messages.
        """
        if self.template is None:
            return self.encode(prompt if system is None else f"{system}\n\n{prompt}")
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        rendered = render_chat(self.template, messages, self.special_tokens, self.where)
        # The template writes every special token itself.
        return self.tokenizer.encode(rendered, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode([int(index) for index in ids], skip_special_tokens=True)


def load_text(source: Path) -> Text:
    """Reads tokenizer and chat template of a checkpoint.

    Args:
      source: a Hugging Face folder or a GGUF file.

    Raises:
      UserError: no tokenizer there, or one that is not supported.
    """
    parts: TokenizerParts = read_tokenizer(source)
    bos = parts.special_tokens.get("bos_token")
    return Text(
        tokenizer=parts.tokenizer,
        template=parts.template,
        special_tokens=parts.special_tokens,
        bos_id=None if bos is None else parts.tokenizer.token_to_id(bos),
        eos_ids=parts.eos_ids,
        where=parts.where,
    )


class StreamDecoder:
    """Decodes tokens as they arrive; the pieces joined are ``text.decode`` of all tokens.

    A piece is held back while it may still change: half a character, or a run of byte tokens (a decoder
    looks at such a run as a whole). What is decided is dropped except its last token, which stays as
    context, because decoders treat the beginning of a text differently (they strip a leading space).

    Example: for a token "A" and an emoji of four byte tokens b1 to b4 ``push`` returns::

        push([A]) -> "A"    push([b1, b2, b3]) -> ""    push([b4]) -> the emoji
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        added = text.tokenizer.get_added_tokens_decoder()
        self._special = {index for index, token in added.items() if token.special}
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Takes further tokens and returns the text that they decide, possibly none."""
        self._pending += [int(index) for index in ids if self._is_text(int(index))]
        if not self._pending or self._is_byte(self._pending[-1]):
            return ""
        piece = self._piece()
        if piece.endswith(REPLACEMENT):
            return ""
        self._context, self._pending = self._pending[-1:], []
        return piece

    def finish(self) -> str:
        """Returns what was held back; bytes that are no character come out as U+FFFD."""
        piece = self._piece() if self._pending else ""
        self._context, self._pending = [], []
        return piece

    def _piece(self) -> str:
        """Text that the pending tokens add after the context."""
        return self._text.decode(self._context + self._pending)[len(self._text.decode(self._context)) :]

    def _is_byte(self, index: int) -> bool:
        return BYTE_TOKEN.fullmatch(self._text.tokenizer.id_to_token(index) or "") is not None

    def _is_text(self, index: int) -> bool:
        """Whether a token is part of the text: no special token, and no id beyond the vocabulary (padded models)."""
        return index not in self._special and self._text.tokenizer.id_to_token(index) is not None
