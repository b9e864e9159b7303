"""Pods with users of their own (`hostUsers: false`): each has other ids of the node's for the same ids inside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate.messages import cri_config_pb2 as config
from kybernate_shim.checkpoint.cleanup import Traces
from kybernate_shim.linux.mount.mountinfo import below
from kybernate_shim.run_directory import SOURCES
from tests.system.checkpoints import PYTHON, dumps_sockets, kybernate
from tests.system.cri import Cri, Pod
from tests.system.ctr import containerd_version, eventually
from tests.system.pod_volumes import kubelet_of, mounted

OF_FIRST, OF_SECOND = 200_000, 400_000

# Ids of every kind in which CRIU and we carry them: credentials of threads, owners of files of the root filesystem, of
# a volume, of memory and of System V objects, those in ACLs and capabilities of files; and rights over the namespaces.
PROGRAM = r"""
import ctypes, json, os, signal, socket, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.makedirs("/srv/made"); os.chown("/srv/made", 7, 8)
open("/srv/kept", "w").write("kept"); os.chown("/srv/kept", 7, 8)
gone = open("/srv/gone", "w+"); gone.write("gone"); gone.flush(); os.fchown(gone.fileno(), 9, 10)
os.unlink("/srv/gone")
open("/volume/kept", "w").write("volume"); os.chown("/volume/kept", 11, 12)
entries = [(1, 6, -1), (2, 4, 21), (4, 4, -1), (8, 4, 22), (16, 6, -1), (32, 0, -1)]
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
rights = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)
for path in ("/srv/kept", "/volume/kept"):
    os.setxattr(path, "system.posix_acl_access", acl); os.setxattr(path, "security.capability", rights)
memory = os.memfd_create("memory"); os.fchown(memory, 13, 14)
queue = libc.msgget(7, 0o1600)
if sys.argv[1:]: server = socket.create_server(("0.0.0.0", 80))
left, right = socket.socketpair()
child = os.fork()
if not child:
    os.setgroups([31]); os.setresgid(20, 20, 20); os.setresuid(21, 21, 21)
    libc.prctl(4, 1)
    signal.sigwait([signal.SIGUSR1])
    os.write(right.fileno(), json.dumps([os.getresuid(), os.getresgid(), os.getgroups()]).encode())
    signal.pause()
thread = threading.Thread(target=signal.pause, daemon=True); thread.start()
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
os.kill(child, signal.SIGUSR1)
def owner(status): return [status.st_uid, status.st_gid]
def may(call, *arguments):
    try: call(*arguments); return True
    except OSError as error: return error.errno
made = socket.socket()
print("FOUND " + json.dumps(dict(
    child=json.loads(os.read(left.fileno(), 4096)),
    me=[os.getuid(), os.getgid()],
    files=[owner(os.stat(path)) for path in ("/srv/made", "/srv/kept", "/volume/kept")],
    acls=[os.getxattr(path, "system.posix_acl_access") == acl for path in ("/srv/kept", "/volume/kept")],
    rights=[os.getxattr(path, "security.capability") == rights for path in ("/srv/kept", "/volume/kept")],
    open=[owner(os.fstat(fd)) for fd in (gone.fileno(), memory)],
    text=[open("/srv/kept").read(), os.pread(gone.fileno(), 10, 0).decode(), open("/volume/kept").read()],
    queue=libc.msgget(7, 0) == queue,
    binds=may(made.bind, ("0.0.0.0", 81)),
    names=may(socket.sethostname, socket.gethostname()),
)), flush=True)
while True: signal.pause()
"""
EXPECTED = {
    "child": [[21, 21, 21], [20, 20, 20], [31]], "me": [0, 0], "files": [[7, 8], [7, 8], [11, 12]],
    "open": [[9, 10], [13, 14]], "text": ["kept", "gone", "volume"], "acls": [True, True], "rights": [True, True],
    "queue": True, "binds": True, "names": True,
}  # fmt: skip


@pytest.fixture
def cri() -> Iterator[Cri]:
    with Cri() as client:
        yield client


def found(cri: Cri, pod: Pod, container: str) -> Any:
    (text,) = eventually(lambda: re.findall(r"FOUND (.*)", "\n".join(cri.log(pod, container))))
    return json.loads(text)


# The root of the lab is an overlay, which cannot be idmapped: memory can.
def own_users(first: int, source: Path, at: str, *, mapped: bool) -> config.Mount:
    """Return the mount of a volume; `mapped`: as the kubelet wants it, with the same owners for each pod."""
    mount = mounted(source, at)
    for ids in (mount.uidMappings, mount.gidMappings) if mapped else ():
        ids.add(host_id=first, container_id=0, length=65536)
    return mount


@pytest.mark.as_root("root of such a pod, and ids that it alone can give to others")
@pytest.mark.parametrize("mapped", [False, True], ids=["owners of the range", "owners as inside"])
def test_pod_with_users_of_its_own_is_restored_with_other_ids(cri: Cri, pods_image: Path, mapped: bool) -> None:
    if mapped and containerd_version() < (2, 0):
        pytest.skip("containerd 1.7 makes no idmapped mounts of volumes")
    command = ["python3", "-c", PROGRAM, *(["serve"] if dumps_sockets() else [])]
    with cri.pod(users=OF_FIRST) as pod, kubelet_of(pod) as kubelet:
        volume = own_users(OF_FIRST, kubelet.empty_dir("kept", memory=mapped), "/volume", mapped=mapped)
        cri.run(pod, "app", command, image=PYTHON, mounts=[volume], add=["SYS_ADMIN"])
        cri.await_log(pod, "app", "ready")
        kybernate("checkpoint", f"default/{pod.config.metadata.name}", str(pods_image), "--exit")
    annotations = {"kybernate.io/restore-from": pods_image.name}
    with cri.pod(users=OF_SECOND, annotations=annotations) as pod, kubelet_of(pod) as kubelet:
        place = kubelet.empty_dir("kept", memory=mapped)
        volume = own_users(OF_SECOND, place, "/volume", mapped=mapped)
        id = cri.run(pod, "app", ["/never/run"], image=PYTHON, mounts=[volume], add=["SYS_ADMIN"])
        ranges = cri.exec(id, "sh", "-c", "kill -USR1 1; cat /proc/self/uid_map")[1].split()
        assert ranges == ["0", str(OF_SECOND), "65536"]
        assert found(cri, pod, "app") == EXPECTED
        assert (place / "kept").stat().st_uid == (11 if mapped else OF_SECOND + 11)
        assert list(SOURCES.iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from kybernate_shim.checkpoint.mounts.reachable import ReachableSource, ReachableSources
with ReachableSources(Path(sys.argv[1]), 0, (ReachableSource("/data", sys.argv[2]),)).made():
    print(os.listdir(sys.argv[1] + "/0"), flush=True)
    os._exit(0)
"""


def test_mounts_of_a_restore_whose_daemon_was_killed_go_and_what_they_show_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    place = SOURCES / "default.c.restore"
    shown = subprocess.run([sys.executable, "-c", KILLED, place, tmp_path], capture_output=True, text=True, check=True)
    assert shown.stdout == "['file']\n"
    assert below(place)
    Traces(tmp_path / "none", "", tmp_path / "state", place.name).clear_restore()
    assert not place.exists()
    assert (tmp_path / "file").read_text() == "kept"
