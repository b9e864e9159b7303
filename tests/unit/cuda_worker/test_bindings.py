"""libcuda is found without `cuda.pathfinder`, which answers everything else."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from kybernate_shim.cuda_worker import bindings

PATHFINDER = bindings.PACKAGE


def run(program: str) -> str:
    """Run a program in an interpreter of its own, because this one may have the package already."""
    return subprocess.check_output([sys.executable, "-c", f"import sys\n{program}"], text=True).strip()


def test_worker_starts_without_the_package() -> None:
    program = f"import kybernate_shim.cuda_worker.handler\nprint({PATHFINDER!r} in sys.modules)"
    assert run(program) == "False"


def test_missing_driver_is_the_linkers_error() -> None:
    program = f"""
from kybernate_shim.cuda_worker import bindings
bindings.LIBRARY = "libcuda.so.none"
try:
    bindings.driver.cuInit(0)
except OSError as error:
    print(error)
print({PATHFINDER!r} in sys.modules)
"""
    assert run(program).splitlines() == [
        "libcuda.so.none: cannot open shared object file: No such file or directory",
        "False",
    ]


def test_what_else_is_imported_is_the_packages_own() -> None:
    program = f"""
from kybernate_shim.cuda_worker.bindings import without_pathfinder
with without_pathfinder():
    from cuda.pathfinder import DynamicLibUnknownError, load_nvidia_dynamic_lib
print(DynamicLibUnknownError is sys.modules[{PATHFINDER!r}].DynamicLibUnknownError)
try:
    load_nvidia_dynamic_lib("no such library")
except DynamicLibUnknownError:
    print("unknown")
"""
    assert run(program).splitlines() == ["True", "unknown"]


def test_package_that_is_there_already_stays() -> None:
    program = f"""
import cuda.pathfinder
from kybernate_shim.cuda_worker import bindings
print(sys.modules[{PATHFINDER!r}] is cuda.pathfinder, hasattr(cuda.pathfinder, "LoadedDL"))
"""
    assert run(program) == "True True"


def test_library_is_the_one_that_the_linker_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "LIBRARY", "libc.so.6")
    assert bindings.load_library(bindings.DRIVER)._handle_uint == ctypes.CDLL("libc.so.6")._handle
