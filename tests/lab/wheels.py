"""The project's dependencies as wheels for a lane's Python, fetched by the machine's pip: a node has no network."""

from __future__ import annotations

import platform
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.lab.failure import check

# Distributions name the same platform in both ways, and pip compares names; the numbers are those of glibc.
LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")
OLDEST_GLIBC, NEWEST_GLIBC = 5, 41


# What the tests in a node need of the project's extras; those of a developer's machine are left out.
EXTRAS = ("agent", "store", "oci", "proxy", "haproxy", "page", "postgresql", "tracing", "test")


def requirements(checkout: Path) -> list[str]:
    """Return what the project needs to be built, to run and to be tested, as pyproject.toml lists it."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    needs = project["project"]
    extras = [need for name in EXTRAS for need in needs["optional-dependencies"][name]]
    return sorted({*project["build-system"]["requires"], *needs["dependencies"], *extras})


def download(wanted: list[str], version: str, into: Path) -> None:
    """Fetch `wanted` and all that it needs into `into`, as wheels for CPython `version` ("3.13")."""
    tag = "cp" + version.replace(".", "")
    options = ["--python-version", version, "--implementation", "cp", "--abi", tag, "--abi", "abi3", "--abi", "none"]
    with tempfile.TemporaryDirectory() as scratch:
        check([sys.executable, "-m", "venv", scratch])
        pip = [f"{scratch}/bin/python", "-m", "pip", "download", "-qq", "--dest", str(into), "--only-binary=:all:"]
        check([*pip, *options, *_platforms(), *wanted])


def _platforms() -> Iterator[str]:
    machine = platform.machine()
    names = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    for name in [*names, *(f"{name}_{machine}" for name in LEGACY), f"linux_{machine}"]:
        yield from ("--platform", name)
