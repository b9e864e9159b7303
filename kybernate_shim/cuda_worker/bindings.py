"""`cuda.bindings.driver`, imported without `cuda.pathfinder`, by which it finds libcuda.

That package knows where each library of CUDA's toolkit may be, and runs a program of the system when it is imported,
which takes nearly half of a worker's start. But libcuda comes with the driver, never with a toolkit, and only the
dynamic linker is asked for it, by cuda.pathfinder, too. Where anything else of the package is needed, it is imported.
Source: cuda.pathfinder's documentation of load_nvidia_dynamic_lib, "Driver libraries".
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PACKAGE = "cuda.pathfinder"
DRIVER, LIBRARY = "cuda", "libcuda.so.1"


class LoadedDriver:
    """libcuda, as the package would have it. What else is asked of it is answered by the package."""

    def __init__(self) -> None:
        self._handle_uint = ctypes.CDLL(LIBRARY, os.RTLD_NOW | os.RTLD_GLOBAL)._handle

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(PACKAGE).load_nvidia_dynamic_lib(DRIVER), name)


def load_library(name: str) -> Any:
    """Load a library by the name that the package has for it."""
    return LoadedDriver() if name == DRIVER else importlib.import_module(PACKAGE).load_nvidia_dynamic_lib(name)


@contextmanager
def without_pathfinder() -> Iterator[None]:
    """Give `load_library` in place of the package to what is imported in the block."""
    if PACKAGE in sys.modules:
        yield
        return
    stand_in = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    vars(stand_in).update(load_nvidia_dynamic_lib=load_library, __getattr__=_of_package)
    try:
        yield
    finally:
        if sys.modules.get(PACKAGE) is stand_in:
            del sys.modules[PACKAGE]


def _of_package(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)  # such as __path__, which says whether it is a package
    sys.modules.pop(PACKAGE, None)
    return getattr(importlib.import_module(PACKAGE), name)


with without_pathfinder():
    from cuda.bindings import driver as driver
