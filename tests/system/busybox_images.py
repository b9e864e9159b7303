"""Images of the node's busybox and of further files, for suites of others whose own images cannot be pulled."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.lab import oci
from tests.lab.images import ACCOUNTS, DIRECTORIES, PATH
from tests.system.ctr import run

# What the suites execute, and Debian's busybox lacks.
SCRIPTS = {"bin/ipcs": b"#!/bin/sh\ncat /proc/sysvipc/shm\n", "bin/pgrep": b'#!/bin/sh\npidof "$1"\n'}


def busybox_image(files: Mapping[str, bytes], *entrypoint: str, name: str = "suite") -> oci.Image:
    """Return an image of busybox and files: those in bin or usr/bin are scripts, or have the set-user-ID bit."""
    applets = subprocess.check_output(["busybox", "--list"], text=True).split()
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in ("bin", *DIRECTORIES):
            oci.add(tar, path, type=tarfile.DIRTYPE, mode=0o1777 if path.endswith("tmp") else 0o755)
        oci.add(tar, "bin/busybox", Path("/bin/busybox").read_bytes(), mode=0o755)
        for applet in sorted(set(applets) - {"busybox"}):  # no symbolic links: a spec masks one applet alone
            oci.add(tar, f"bin/{applet}", type=tarfile.LNKTYPE, linkname="bin/busybox", mode=0o755)
        for path, data in {**ACCOUNTS, **SCRIPTS, **files}.items():
            executed = path.startswith(("bin/", "usr/bin/"))
            oci.add(tar, path, data, mode=(0o755 if data.startswith(b"#!") else 0o4755) if executed else 0o644)
    command = {"Entrypoint": list(entrypoint)} if entrypoint else {"Cmd": ["sh"]}
    return oci.image(name, layer.getvalue(), Env=[PATH], **command)


def compiled(source: str, scratch: Path) -> bytes:
    """Return the program of a source in C, without shared libraries."""
    run(["gcc", "-static", "-x", "c", "-", "-o", str(scratch / "compiled")], stdin=source.encode())
    return (scratch / "compiled").read_bytes()
