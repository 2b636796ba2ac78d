"""Renders chat templates, which are Jinja programs inside checkpoints, in Jinja's sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from entmtp_jax.errors import UserError


def render_chat(
    template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str], where: str
) -> str:
    """Renders messages as one text that ends where the assistant's answer begins.

    The environment offers what Hugging Face's does: ``raise_exception``, ``strftime_now``, a ``tojson``
    that escapes nothing, loop controls, and the special tokens by name.

    Args:
      template: Jinja source.
      messages: dicts with ``role`` and ``content``.
      special_tokens: such as ``bos_token``, by name.
      where: file, for messages.

    Raises:
      UserError: the template refuses the messages or is not valid.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    variables = {**special_tokens, "tools": None, "documents": None}
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **variables
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise UserError(f"{where}: the chat template cannot be applied ({error}); use --no-chat") from None


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
