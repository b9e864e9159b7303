"""Versions of the programs that take part in a checkpoint and a restore, each asked once (known_versions.py)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.criu.config import OLDEST, CriuRunner, criu_version, parse_version
from kybernate_shim.checkpoint.image.manifest import Program
from kybernate_shim.errors import Refused
from kybernate_shim.known_versions import KNOWN, keep_version, known_version, record_of

VERSION_SECONDS: Final = 10.0


async def criu_of(runner: CriuRunner, criu: Path | None, known: Path = KNOWN) -> Program:
    """Return CRIU as it will be run. Raises Refused for one that is missing or older than 4.1."""
    program = str(criu or "criu")
    version = await _version(program, known, lambda: criu_version(runner, program))
    if parse_version(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Refused(f"{program} is version {version}, at least {oldest} is needed; nothing was changed")
    return Program("criu", version)


async def runtime_of(runner: CriuRunner, binary: Path, known: Path = KNOWN) -> Program:
    """Return the OCI runtime's name and version; one that does not say has the version ""."""

    async def ask() -> str:
        finished = await runner.run([str(binary), "--version"], timeout=VERSION_SECONDS)
        found = re.search(r"version\s+v?(\S+)", finished.stdout)
        return found[1] if found else ""

    return Program(binary.name, await _version(str(binary), known, ask))


async def _version(program: str, known: Path, ask: Callable[[], Awaitable[str]]) -> str:
    """Return the version kept for the program file, or ask the program and keep its answer, if possible."""
    path = shutil.which(program)
    if path is None:
        return await ask()  # whose error names the program
    record = record_of(Path(path).name, path, known)
    version = known_version(record)
    if version is None:
        version = await ask()
        keep_version(record, version)
    return version
