"""Packs what a machine with GPUs lacks: `python -m tests.gpu.kit` makes build/gpu-kit, about 55 MB.

Programs (containerd, runc, CRIU, NVIDIA's container toolkit) and the libraries below them come from the roots of the
lab, Python packages from the package index, as wheels for the Python of the machine. `tests/gpu/run` unpacks both over
there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.lab import wheels
from tests.lab.failure import check

CHECKOUT = Path(__file__).resolve().parents[2]
KIT = CHECKOUT / "build/gpu-kit"
# CRIU before 4.2 cannot dump network sockets, as NCCL's ranks have them, on Linux 6.16 and later. It needs glibc 2.38.
PROGRAMS = {"trixie": ("containerd", "ctr", "runc"), "sid": ("criu",)}
TOOLKIT = ("nvidia-cdi-hook", "nvidia-container-runtime", "nvidia-ctk")  # where the lab could build it
# Of the C library, which every machine has, and which must not come from elsewhere.
OWN = re.compile(r"/(ld-linux|libc|libm|libdl|libpthread|librt|libresolv)[.-]")


def main() -> None:
    """Pack; with --programs, in the lab, only what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default="3.12", help="version on the machine (3.12)")
    parser.add_argument(
        "--extras", type=lambda text: text.split(","), default=[], help="of pyproject.toml, such as a,b"
    )
    parser.add_argument("--into", type=Path, default=KIT, help="inside build/ (build/gpu-kit)")
    parser.add_argument("--programs", choices=PROGRAMS, metavar="LANE", help="only write the programs of this root")
    arguments = parser.parse_args()
    kit = arguments.into.absolute()
    if arguments.programs:
        toolkit = [name for name in TOOLKIT if arguments.programs == "trixie" and shutil.which(name)]
        pack_programs([*PROGRAMS[arguments.programs], *toolkit], kit / f"programs-{arguments.programs}.tar.xz")
        return
    kit.mkdir(parents=True, exist_ok=True)
    inside = f"/src/{kit.relative_to(CHECKOUT)}"
    for lane in PROGRAMS:
        pack = ["python3", "-m", "tests.gpu.kit", "--programs", lane, "--into", inside]
        check([CHECKOUT / "tests/lab/run", lane, "--", *pack])
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = [need for name in arguments.extras for need in project["optional-dependencies"][name]]
    wheels.download([*project["dependencies"], *extras], arguments.python, kit / "wheels")
    size = sum(path.stat().st_size for path in kit.rglob("*"))
    print(f"{kit}: {size / 1e6:.0f} MB")


def pack_programs(names: Sequence[str], archive: Path) -> None:
    """Write programs to libexec/ and the libraries that they load to lib/ of an archive."""
    found = [_which(name) for name in names]
    libraries = {library for program in found for library in _libraries(program)}
    with tarfile.open(archive, "w:xz") as tar:
        for program in found:
            tar.add(program.resolve(), f"libexec/{program.name}")
        for library in sorted(libraries):
            tar.add(library.resolve(), f"lib/{library.name}")


def _which(name: str) -> Path:
    """Return the program itself: a script of that name, earlier in PATH, is the lab's own."""
    places = (Path(directory, name) for directory in os.get_exec_path())
    return next(place for place in places if place.is_file() and place.read_bytes().startswith(b"\x7fELF"))


def _libraries(program: Path) -> list[Path]:
    loaded = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [Path(path) for path in re.findall(r"=> (/\S+)", loaded) if not OWN.search(path)]


if __name__ == "__main__":
    main()
