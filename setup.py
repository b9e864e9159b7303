"""Compiles what is written in C into the wheel; everything else is in pyproject.toml."""

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path("kybernate_shim")


class BuildWithNative(build_py):
    """Builds the package, and beside its sources what is compiled of them; without a C compiler, the package alone."""

    def run(self) -> None:
        super().run()
        place = PACKAGE if self.editable_mode else Path(self.build_lib) / PACKAGE
        native = runpy.run_path(str(PACKAGE / "native.py"))
        try:
            for product in native["PRODUCTS"]:
                native["build"](product, place)
        except FileNotFoundError as error:
            sys.stderr.write(f"warning: containers start slowly, and without the arena: nothing compiles C: {error}\n")


class WheelOfPlatform(bdist_wheel):
    """Names the wheel after the platform of what is compiled, which no Python version matters to."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithNative, "bdist_wheel": WheelOfPlatform})
