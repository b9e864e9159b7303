"""A second container of a pod changes the files of the first one, or of their volume, all the while it is checkpointed.

The first one hands a descriptor of a directory over, or both mount the volume. Whatever is done there: nothing of the
node is in the image, the operation ends, and the first container ends only with an image that restores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from kybernate_shim.checkpoint.image.verification import verify
from tests.hostile.tenant import SECRET, Tenant
from tests.system.checkpoints import PYTHON, assert_no_image
from tests.system.cri import Pod
from tests.system.ctr import eventually, finished
from tests.system.tenants import pods_place

DEADLINE = 60  # seconds of a checkpoint
FROM = "kybernate.io/restore-from"
# Makes files, gives away the directory that has them, and counts.
GIVING = """
import os, socket, sys, threading, time
where, key = sys.argv[1:]
os.makedirs(where, exist_ok=True); os.chdir(where)
os.makedirs("directory/inner/most"); open("directory/key", "w").write("innocent"); os.chmod("directory", 0o777)
os.symlink(key, "link")
open("plain", "w").write("innocent"); os.chmod("plain", 0o666); os.mkfifo("fifo"); os.chmod(".", 0o777)
open("large", "wb").write(os.urandom(8 << 20)); os.chmod("large", 0o666)
server = socket.socket(socket.AF_UNIX); server.bind("\\0given"); server.listen()
def give():
    while True: socket.send_fds(server.accept()[0], [b"x"], [os.open(where, os.O_RDONLY)])
threading.Thread(target=give, daemon=True).start()
os.chdir("/")
number = 0
while True:
    number += 1; print(number, flush=True); time.sleep(0.05)
"""
# The other one, in that directory.
TAKING = """
import ctypes, fcntl, os, platform, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
client = socket.socket(socket.AF_UNIX); client.connect("\\0given")
os.fchdir(socket.recv_fds(client, 1, 1)[1][0])
def exchange(one, other):
    number = {"x86_64": 316, "aarch64": 276}[platform.machine()]
    return libc.syscall(number, -100, one.encode(), -100, other.encode(), 2)
def again(work):
    work()
    print("ready", flush=True)
    while True:
        try: work()
        except OSError: pass
"""


@dataclass(frozen=True)
class Row:
    """What the second container does; `work` is done again and again."""

    name: str
    work: str
    before: str = ""


ROWS = (
    Row("a directory and a link to one of the node", "exchange('directory', 'link')"),
    Row("a file and a link", "exchange('plain', 'key')", "os.symlink(sys.argv[1] + '/key', 'key')"),
    Row("a file and a FIFO", "exchange('plain', 'fifo')"),
    Row("a file and a directory", "exchange('plain', 'directory')"),
    Row("a file and a device without end", "exchange('plain', 'zero')", "os.mknod('zero', 0o20666, os.makedev(1, 5))"),
    Row(
        "a file and a socket",
        "exchange('plain', 'socket')",
        "kept = socket.socket(socket.AF_UNIX); kept.bind('socket'); kept.listen()",
    ),
    Row("a file that grows and shrinks", "os.write(large, bytes(1 << 20)); os.ftruncate(large, 0)",
        "large = os.open('large', os.O_RDWR | os.O_APPEND)"),
    Row("a file that becomes sparse, and has terabytes", "os.ftruncate(large, 8 << 40); os.ftruncate(large, 1 << 20)",
        "large = os.open('large', os.O_RDWR)"),
    Row(
        "holes that come and go",
        "libc.fallocate(large, 3, ctypes.c_long(0), ctypes.c_long(4 << 20)); os.pwrite(large, bytes(1 << 20), 1 << 20)",
        "large = os.open('large', os.O_RDWR)",
    ),
    Row("files that come and go", """
    for n in range(200): open("new%d" % n, "w").close()
    for n in range(200): os.unlink("new%d" % n)
    """),
    Row("a directory of many names that is emptied and filled again", """
    for n in range(5000): os.unlink("many/%d" % n)
    for n in range(5000): os.symlink("x", "many/%d" % n)
    """, """
os.mkdir("many")
for n in range(5000): os.symlink("x", "many/%d" % n)
"""),
    Row("directories that move upwards", """
    os.rename("directory/inner/most", "most"); os.rename("directory/inner", "inner")
    os.rename("inner", "directory/inner"); os.rename("most", "directory/inner/most")
    """),
    Row("names and links that come and go", """
    os.link("large", "other"); os.unlink("large"); os.link("other", "large"); os.unlink("other")
    """),
    Row("attributes that come and go", """
    for n in range(20): os.setxattr("plain", "user.a%d" % n, b"x" * 50)
    for n in range(20): os.removexattr("plain", "user.a%d" % n)
    """),
    Row(
        "a lease that is not given up",
        "time.sleep(0.01)",
        """
signal.signal(signal.SIGIO, signal.SIG_IGN)
open("leased", "w").write("x"); kept = os.open("leased", os.O_RDONLY); fcntl.fcntl(kept, 1024, fcntl.F_WRLCK)
""",
    ),
    Row("a directory that is replaced by one of other files", """
    exchange("directory", "other directory")
    """, "os.makedirs('other directory/inner/most'); open('other directory/key', 'w').write('innocent')"),
)  # fmt: skip


@dataclass
class Attacked:
    """A pod of which the second container changes what the first one has at `where`."""

    tenant: Tenant
    pod: Pod
    id: str
    mounts: Sequence[Any] = field(default_factory=list)

    def count(self) -> int:
        numbers = [int(line) for line in self.tenant.cri.log(self.pod, "giving") if line.isdigit()]
        return (numbers or [0])[-1]


@contextmanager
def attacked(tenant: Tenant, row: Row, place: str, node_key: Path) -> Iterator[Attacked]:
    pod = tenant.pod()
    where = "/given" if place == "volume" else "/tmp/given"
    mounts = [tenant.mounted(tenant.empty_dir(pod), where)] if place == "volume" else []
    argv = ["python3", "-c", GIVING, where, str(node_key)]
    id = tenant.cri.run(pod, "giving", argv, image=PYTHON, mounts=mounts)
    one = Attacked(tenant, pod, id, mounts)
    eventually(lambda: one.count() > 2)
    program = f"{TAKING}{row.before}\ndef work():\n    {row.work.strip()}\nagain(work)\n"
    tenant.cri.run(pod, "taking", ["python3", "-c", program, str(node_key)], image=PYTHON)
    tenant.cri.await_log(pod, "taking", "ready", seconds=60)
    yield one


def has_secret(directory: Path) -> bool:
    return any(SECRET in path.read_bytes() for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("place", ["rootfs", "volume"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_container_ends_only_with_an_image_that_restores_and_has_nothing_of_the_node(
    tenant: Tenant, node_key: Path, row: Row, place: Literal["rootfs", "volume"]
) -> None:
    with attacked(tenant, row, place, node_key) as one, pods_place(tenant.namespace) as image:
        ended = False
        for _ in range(5):
            argv = ["kybernate", "checkpoint", one.id, str(image), "--exit", "--timeout", str(DEADLINE)]
            done = finished(argv, timeout=2 * DEADLINE)
            said = done.stderr.decode(errors="replace")
            assert "Traceback" not in said
            if ended := done.returncode == 0:
                break
            print(row.name, "refused:", said)
            assert_no_image(image)
            assert tenant.cri.state(one.id) == "CONTAINER_RUNNING"
            before = one.count()
            eventually(lambda: one.count() > before)  # noqa: B023  # asked now
        if ended:
            assert not verify(image)
            assert not has_secret(image)
            seen = one.count()
            pod = tenant.pod(annotations={FROM: image.name})
            mounts = [tenant.mounted(tenant.empty_dir(pod), "/given")] if place == "volume" else []
            again = tenant.cri.run(pod, "giving", ["/never/run"], image=PYTHON, mounts=mounts)
            restored = Attacked(tenant, pod, again)
            eventually(lambda: restored.count() > seen)
    assert {path.name: path.read_bytes() for path in node_key.iterdir()} == {"key": SECRET}
