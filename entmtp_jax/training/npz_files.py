"""NumPy archives: written whole or not at all, read without executing pickled objects."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from entmtp_jax.errors import UserError
from entmtp_jax.whole_files import replacing


def read_npz(path: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Arrays of an archive by name.

    Args:
      path: of the file.
      names: which arrays to read; all if None.

    Raises:
      UserError: no such file, or it is damaged, no archive, or lacks an array.
    """
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UserError(f"{path}: a lone array, but an .npz archive is expected")
            missing = [name for name in names or () if name not in archive]
            if missing:
                raise UserError(f"{path}: lacks the array {missing[0]!r}; it should hold {', '.join(names or ())}")
            return {name: archive[name] for name in names or archive.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder; check the path") from None
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: damaged or no .npz archive ({error}); remove it and make it again") from None


def write_npz(path: Path, arrays: Mapping[str, np.ndarray], *, compress: bool) -> None:
    """Writes an archive; a reader never sees half of it.

    Raises:
      UserError: the folder cannot be written.
    """
    save = np.savez_compressed if compress else np.savez
    with replacing(path) as unfinished, open(unfinished, "wb") as file:
        save(file, allow_pickle=False, **arrays)
