"""The content of the lab's three images, taken from the packages of its root."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab import debian, oci

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ACCOUNTS = {
    "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": b"root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
}
DIRECTORIES = ("dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "usr", "var", "var/tmp")

PYTHON_PACKAGES = ("base-files", "bash", "coreutils", "dash", "procps", "python3-minimal", "libpython3-stdlib")
# Needed to install packages or to know zones, and of no use in an image that never changes.
UNWANTED = frozenset({"debconf", "debconf-2.0", "dpkg", "tzdata", "perl-base", "init-system-helpers", "awk", "mawk"})
UNUSED = ("/gconv/", "/common-licenses/", "/engines-3/", "libdb-5.3", "libmvec")


def build(root: Path) -> list[oci.Image]:
    """Return the images made of the packages installed in `root`: busybox, pause and python."""
    return [
        oci.image("busybox", _busybox(root), Cmd=["sh"], Env=[PATH], WorkingDir="/"),
        oci.image("pause", _pause(root), Entrypoint=["/catatonit", "-P"], Env=[PATH], User="65534:65534"),
        oci.image("python", _python(root), Cmd=["python3"], Env=[PATH, "LANG=C.UTF-8"], WorkingDir="/"),
    ]


def _busybox(root: Path) -> bytes:
    """Every applet is a link in /bin, so that PATH finds them whatever the caller's is."""
    applets = subprocess.check_output([root / "bin/busybox", "--list"], text=True).split()
    with _layer() as (tar, layer):
        oci.add(tar, "bin", type=tarfile.DIRTYPE, mode=0o755)
        oci.add(tar, "bin/busybox", (root / "bin/busybox").read_bytes(), mode=0o755)
        for applet in sorted(set(applets) - {"busybox"}):
            oci.add(tar, f"bin/{applet}", type=tarfile.SYMTYPE, linkname="busybox")
    return layer.getvalue()


def _pause(root: Path) -> bytes:
    with _layer() as (tar, layer):
        oci.add(tar, "catatonit", (root / "usr/bin/catatonit").read_bytes(), mode=0o755)
    return layer.getvalue()


def _python(root: Path) -> bytes:
    """Python's standard library with coreutils and bash, file by file as the packages list them."""
    packages = debian.closure(root, PYTHON_PACKAGES, without=UNWANTED)
    own = {*ACCOUNTS, *DIRECTORIES}
    with _layer() as (tar, layer):
        for path in [*debian.files(root, packages), "etc/ld.so.cache", "usr/bin/sh"]:
            if path not in own and not any(part in path for part in UNUSED):
                own.add(path)
                tar.add(root / path, path, recursive=False, filter=_timeless)
    return layer.getvalue()


@contextmanager
def _layer() -> Iterator[tuple[tarfile.TarFile, io.BytesIO]]:
    """Open a layer that holds what every image has, accounts and the usual directories; it is whole in the end."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in DIRECTORIES:
            oci.add(tar, path, type=tarfile.DIRTYPE, mode=0o1777 if path.endswith("tmp") else 0o755)
        for path, data in ACCOUNTS.items():
            oci.add(tar, path, data)
        yield tar, layer


def _timeless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = 0
    return member
