"""Compiles the preload library into the wheel; everything else is in pyproject.toml."""

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = Path("kybernate_shim/cuda/preload")


class BuildWithLibrary(build_py):
    """Builds the package, and the library beside its sources; without a C compiler, the package alone."""

    def run(self) -> None:
        super().run()
        place = FOLDER if self.editable_mode else Path(self.build_lib) / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        try:
            runpy.run_path(str(FOLDER / "build.py"))["build"](place)
        except FileNotFoundError as error:
            sys.stderr.write(f"warning: no arena, since its preload library cannot be compiled: {error}\n")


class WheelOfPlatform(bdist_wheel):
    """Names the wheel after the platform of the library, which no Python version matters to."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelOfPlatform})
