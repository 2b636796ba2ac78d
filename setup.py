"""The one build step that ``pyproject.toml`` cannot say: a wheel carries the asset folders inside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
ASSETS = ("models", "trees")


class BuildWithAssets(build_py):
    """Copies ``models/`` and ``trees/`` to ``entmtp_jax/_assets``, where ``entmtp_jax.assets`` looks first."""

    def run(self) -> None:
        """Builds the package, then adds the assets."""
        super().run()
        if self.editable_mode:
            return  # an editable install reads the folders of the checkout
        target = Path(self.build_lib) / "entmtp_jax" / "_assets"
        shutil.rmtree(target, ignore_errors=True)  # what an earlier build left must not come back
        for kind in ASSETS:
            shutil.copytree(ROOT / kind, target / kind, ignore=shutil.ignore_patterns("*.partial", ".*"))


setup(cmdclass={"build_py": BuildWithAssets})
