"""The checker that the import hook in ``conftest.py`` puts on every annotated function of the package."""

import typing
from collections.abc import Callable
from typing import Any

from beartype import beartype
from jaxtyping import AbstractArray


def check_shapes(function: Callable) -> Callable:
    """Checks the arguments and results that are annotated with array shapes, and leaves the others to pyright."""
    hints = function.__annotations__.items()
    function.__annotations__ = {name: hint for name, hint in hints if mentions_shape(hint)}
    return beartype(function)


def mentions_shape(hint: Any) -> bool:
    """Whether an annotation is an array with a shape, or contains one, as ``tuple[Float[Array, "B"], ...]`` does."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(mentions_shape, typing.get_args(hint)))
