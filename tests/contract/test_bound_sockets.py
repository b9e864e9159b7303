"""Which UNIX sockets a restore from the image alone could bind: of a program on an overlay, with mounts of its own."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kybernate_shim.checkpoint.bound_sockets import Unbindable, socket_directory_not_saved, without_directory
from kybernate_shim.checkpoint.rootfs.overlay import find_overlay
from kybernate_shim.checkpoint.sockets import container_sockets
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.mountinfo import below
from kybernate_shim.linux.mount.overlay import in_directory

pytestmark = pytest.mark.root

# Makes directories and binds sockets in a mount namespace of its own, with /scratch a tmpfs, and waits to be ended.
PROGRAM = """
import os, socket, sys
os.chdir(sys.argv[1])
kept = []
def listen(path, kind=socket.SOCK_STREAM):
    kept.append(socket.socket(socket.AF_UNIX, kind))
    kept[-1].bind(path)
    if kind == socket.SOCK_STREAM:
        kept[-1].listen()
    return path
exec(sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""


class Root:
    """An overlay over two layers of an image, all below `base`; with their names in the `short` form, or in full."""

    def __init__(self, base: Path, *, short: bool) -> None:
        self.path = base / "root"
        for name in ("1/srv/inner", "2/srv/hidden", "2/tmp", "2/scratch", "up", "work", "root"):
            (base / name).mkdir(parents=True)
        layers = "1:2" if short else f"{base}/1:{base}/2"
        data = f"lowerdir={layers},upperdir={base}/up,workdir={base}/work"
        in_directory(str(base), lambda: syscalls.mount("overlay", str(self.path), "overlay", 0, data))

    def unbindable(self, script: str) -> list[str]:
        """Return the paths of sockets that a program which runs `script` has, and that a restore could not bind."""
        mounted = f'mount -t tmpfs none {self.path}/scratch && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", PROGRAM, self.path, script]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            found = without_directory(container_sockets([process.pid]), process.pid, self.path)
            assert {one.pid for one in found} <= {process.pid}
            process.communicate()
            return [str(Path(one.path).relative_to(self.path)) for one in found]


@contextmanager
def overlay(*, short: bool = False) -> Iterator[Root]:
    with TemporaryDirectory(dir="/var/tmp") as base:
        try:
            yield Root(Path(base), short=short)
        finally:
            for mount in below(Path(base)):
                syscalls.umount(str(mount.path))


CASES: dict[str, tuple[str, Sequence[str]]] = {
    "new directory": ("os.mkdir('tmp/new'); listen('tmp/new/one')", ["tmp/new/one"]),
    "below a new one": ("os.makedirs('srv/new/deep'); listen('srv/new/deep/one')", ["srv/new/deep/one"]),
    "absolute": ("os.mkdir('tmp/new'); listen(os.path.abspath('tmp/new/one'))", ["tmp/new/one"]),
    "datagrams": ("os.mkdir('tmp/new'); listen('tmp/new/one', socket.SOCK_DGRAM)", ["tmp/new/one"]),
    "directory of the image": ("listen('tmp/one'); listen('srv/inner/one'); listen('srv/hidden/one')", []),
    "made again": ("os.rmdir('srv/inner'); os.mkdir('srv/inner'); listen('srv/inner/one')", []),
    "tmpfs": ("os.mkdir('scratch/new'); listen('scratch/new/one')", []),
    "abstract": ("listen(chr(0) + 'kybernate-test-one')", []),
    "unlinked": ("os.mkdir('tmp/new'); os.unlink(listen(os.path.abspath('tmp/new/one')))", []),
    "unlinked, relative": ("os.mkdir('tmp/new'); os.unlink(listen('tmp/new/one'))", ["tmp/new/one"]),
    "accepted": (
        "os.mkdir('tmp/new'); peer = socket.socket(socket.AF_UNIX); peer.connect(listen('tmp/new/one'));"
        "kept.append(kept[0].accept()[0]); kept.pop(0).close()",
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_socket_is_named_where_its_directory_is_not_in_the_image(case: str) -> None:
    script, unbindable = CASES[case]
    with overlay() as root:
        assert root.unbindable(script) == unbindable


@pytest.mark.parametrize("short", [False, True], ids=["in full", "short"])
def test_image_is_known_by_its_layers(short: bool) -> None:
    """A directory that the container has made again is in it, too."""
    with overlay(short=short) as root:
        (root.path / "new").mkdir()
        (root.path / "tmp").rmdir()
        (root.path / "tmp").mkdir()
        found = find_overlay(root.path)
        assert [layer.name for layer in found.lower] == ["1", "2"]
        assert found.in_image(("srv", "inner"))
        assert found.in_image(("srv", "hidden"))
        assert found.in_image(("tmp",))
        assert not found.in_image(("new",))


@pytest.mark.parametrize("hiding", ["opaque", "whiteout", "file"])
def test_upper_layer_of_the_image_hides_a_lower_one(hiding: str) -> None:
    with overlay() as root:
        found = find_overlay(root.path)
        one = found.lower[0] / "srv/hidden"
        assert found.in_image(("srv", "hidden"))
        if hiding == "opaque":
            os.setxattr(one.parent, "trusted.overlay.opaque", b"y")
        elif hiding == "whiteout":
            os.mknod(one, stat.S_IFCHR, 0)
        else:
            one.touch()
        assert not found.in_image(("srv", "hidden"))


def test_error_says_who_has_what_and_what_to_do() -> None:
    told = str(socket_directory_not_saved("web", [Unbindable("/tmp/a\n/one", os.getpid())] * 5))
    assert f"[{os.getpid()}] has the UNIX socket '/tmp/a\\n/one' open" in told
    assert "and there are 2 more" in told
    assert "Leave --no-rootfs away" in told
    assert told.endswith("container web continues as before")
