"""Versions of the programs that take part, asked once per program and boot of the node.

A daemon lives as long as one pod, so what it knows must outlive it: each checkpoint and restore would wait for two
programs to start otherwise. A version is kept in a file whose name is made from what identifies a program file, so that
an upgrade is noticed without a cleanup.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.criu.config import OLDEST, CriuRunner, CriuUnusable, criu_version, parse_version
from kybernate_shim.checkpoint.image.manifest import Program
from kybernate_shim.linux.atomic_write import replace_file
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.run_directory import RUN

VERSION_SECONDS: Final = 10.0
KNOWN: Final = RUN / "versions"


async def criu_of(runner: CriuRunner, criu: Path | None, known: Path = KNOWN) -> Program:
    """Return CRIU as it will be run. Raises CriuUnusable for one that is missing or older than 4.1."""
    program = str(criu or "criu")
    version = await _version(program, known, lambda: criu_version(runner, program))
    if parse_version(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise CriuUnusable(f"{program} is version {version}, at least {oldest} is needed; nothing was changed")
    return Program("criu", version)


async def runtime_of(runner: CriuRunner, binary: Path, known: Path = KNOWN) -> Program:
    """Return the OCI runtime's name and version; one that does not say has the version ""."""

    async def ask() -> str:
        finished = await runner.run([str(binary), "--version"], timeout=VERSION_SECONDS)
        found = re.search(r"version\s+v?(\S+)", finished.stdout)
        return found[1] if found else ""

    return Program(binary.name, await _version(str(binary), known, ask))


async def _version(program: str, known: Path, ask: Callable[[], Awaitable[str]]) -> str:
    """Return the version kept for the program file, or ask the program. It is no error if the answer cannot be kept."""
    path = shutil.which(program)
    if path is None:
        return await ask()  # whose error names the program
    record = known / _identity(path)
    try:
        return record.read_text()
    except OSError:
        version = await ask()
        _keep(record, version)
        return version


def _identity(path: str) -> str:
    """Return a file name that no other program file has, nor this one after a change."""
    status = Path(path).stat()
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ".".join([Path(path).name, *(f"{number:x}" for number in numbers)])


def _keep(record: Path, version: str) -> None:
    with suppress(OSError):  # the program is asked again next time
        make_directory(record.parent)
        replace_file(record, version)
