"""Where the files that are shipped beside the code lie: trained heads in ``models/``, banks in ``trees/``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

DEFAULT_MODEL = "smollm2-135m-instruct"  # the backbone whose heads and banks are shipped

_PACKAGE = Path(__file__).resolve().parent


def assets_folder(kind: Literal["models", "trees"]) -> Path:
    """The folder of one kind of asset: inside the package in a wheel, the top-level one in a checkout."""
    packaged = _PACKAGE / "_assets" / kind
    return packaged if packaged.is_dir() else _PACKAGE.parent / kind
