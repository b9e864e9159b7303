"""Installs the checkout's project, as a user would by pip, into a layer of its own above a lane's root.

The layer is named by a hash of the sources, so a run whose sources were installed before starts immediately.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from tests.lab.failure import check
from tests.lab.root import ENVIRONMENT, VENV

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md", "kybernate_shim", "kybernate")
COMPILED = ("__pycache__", "*.pyc", "*.so", "client", "hold-restored")  # here; the node compiles its own
COMMANDS = ("kybernate",)  # the shim is not a link: `install_shim` writes it into the node
PIP = f"{VENV}/bin/python -m pip install --no-index --no-deps --no-build-isolation --no-cache-dir -qq"
# The root stays as it is: in a mount namespace of this command alone, the staging area appears on it. Its own /tmp
# serves as pip's, which builds there.
INSTALL = f"""
mount --bind "$1" "$2/mnt"
mount --bind "$1/tmp" "$2/tmp"
exec chroot "$2" {PIP} --root /mnt/installed /mnt/source
"""


def stage(checkout: Path, area: Path) -> str:
    """Copy the project's sources to `area`, an empty directory, and return the hash of what was copied."""
    source = area / "source"
    source.mkdir()
    for name in SOURCES:
        if (checkout / name).is_dir():
            shutil.copytree(
                checkout / name,
                source / name,
                ignore=_compiled,
            )
        elif (checkout / name).exists():
            shutil.copy(checkout / name, source)
    digest = hashlib.sha256()
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(source)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def _compiled(directory: str, names: list[str]) -> set[str]:
    """Return what is not to be copied of a directory: a package may have the name of a program."""
    found = shutil.ignore_patterns(*COMPILED)(directory, names)
    return {name for name in found if name == "__pycache__" or not Path(directory, name).is_dir()}


def install_shim() -> None:
    """Put the shim where containerd finds it, as the README says; in a node, where the installation has its path."""
    if Path(VENV, "bin/containerd-shim-kybernate-v1").exists():
        check([f"{VENV}/bin/python", "-Im", "kybernate_shim.launcher", "/usr/local/bin"], env=ENVIRONMENT)


def install(area: Path, root: Path, layer: Path) -> None:
    """Fill `layer` with what installing the staged sources adds to `root`. Raises LabFailed if pip refuses."""
    (area / "tmp").mkdir()
    check(["unshare", "--mount", "sh", "-ec", INSTALL, "sh", area, root], env=ENVIRONMENT)
    for path in (area / "installed").iterdir():
        path.rename(layer / path.name)
    commands = layer / "usr/local/bin"
    commands.mkdir(parents=True)
    for name in COMMANDS:
        if (layer / VENV[1:] / "bin" / name).exists():
            (commands / name).symlink_to(f"{VENV}/bin/{name}")
