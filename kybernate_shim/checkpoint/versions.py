"""Versions of the programs that take part, asked once per program and daemon."""

from __future__ import annotations

import re
from pathlib import Path

from kybernate_shim.checkpoint.criu import OLDEST, CriuUnusable, Runner, criu_version, parse_version
from kybernate_shim.checkpoint.manifest import Program

VERSION_SECONDS = 10.0
_known: dict[tuple[str, float], str] = {}


async def criu_of(runner: Runner, criu: Path | None) -> Program:
    """Return CRIU as it will be run. Raises CriuUnusable for one that is missing or older than 4.1."""
    program = str(criu or "criu")
    key = _key(program)
    if key not in _known:
        _known[key] = await criu_version(runner, program)
    if parse_version(_known[key]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise CriuUnusable(f"{program} is version {_known[key]}, at least {oldest} is needed; nothing was changed")
    return Program("criu", _known[key])


async def runtime_of(runner: Runner, binary: Path) -> Program:
    """Return the OCI runtime's name and version; one that does not say has the version ""."""
    key = _key(str(binary))
    if key not in _known:
        finished = await runner.run([str(binary), "--version"], timeout=VERSION_SECONDS)
        found = re.search(r"version\s+v?(\S+)", finished.stdout)
        _known[key] = found[1] if found else ""
    return Program(binary.name, _known[key])


def _key(program: str) -> tuple[str, float]:
    path = Path(program)
    return program, path.stat().st_mtime if path.is_absolute() and path.exists() else 0.0
