"""Set-up of the whole test run: compiled programs are kept, shapes are checked, model tests know if they can run."""

import functools
import getpass
import os
import tempfile
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

from tests.shape_checks import check_shapes

# Shapes in the annotations of the package are checked at run time, in the tests only; so the hook
# comes before anything imports the package.
install_import_hook("entmtp_jax", f"{check_shapes.__module__}.{check_shapes.__name__}")


def compile_cache_folder() -> Path:
    """Where this run keeps compiled programs: the second run of the suite compiles next to nothing."""
    chosen = os.environ.get("ENTMTP_TEST_CACHE")
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"entmtp-test-cache-{getpass.getuser()}"


def pytest_configure() -> None:
    # In the environment rather than in jax.config, so that programs which tests start share the folder.
    folder = compile_cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"


@functools.cache
def why_no_default_model() -> str:
    """Fetches the default model if it is not in the cache; the reason when it cannot be had, else empty."""
    from entmtp_jax.errors import UserError
    from entmtp_jax.hub import DEFAULT_MODEL, cache_folder, resolve_model

    try:
        resolve_model(DEFAULT_MODEL, cache_folder())
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a Hugging Face folder, to be read only."""
    from tests.model_folder import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("model") and (reason := why_no_default_model()):
        pytest.skip(reason)
