"""Containers of one pod, of which one changes the other's files while the node reads them as root.

The one hands the other a descriptor of a directory of its own root filesystem, over a socket of the network namespace
that they share; so the other reaches it while the first one is frozen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.rootfs.diff import write_diff
from kybernate_shim.checkpoint.rootfs.overlay import find_overlay
from kybernate_shim.checkpoint.volumes.fill import PlacedVolume, fill
from kybernate_shim.checkpoint.volumes.marks import FILLED
from kybernate_shim.checkpoint.volumes.places import PodVolume
from kybernate_shim.checkpoint.volumes.save import ChosenVolumes, measure, save
from kybernate_shim.errors import Failed
from kybernate_shim.oci.spec import Spec
from tests.hostile.tenant import SECRET, Tenant
from tests.system.checkpoints import PYTHON
from tests.system.cri import Pod
from tests.system.ctr import BUNDLES

DIFFS = 25
SECONDS = 60  # for all of them, of which one takes milliseconds
# Makes pairs of names, of files as long as the node's, and gives away the directory that has them.
GIVING = """
import os, socket, sys, time
os.makedirs("/given", exist_ok=True); os.chdir("/given")
os.mkdir("directory"); open("directory/key", "w").write("innocent")
os.symlink(sys.argv[1], "link to a directory")
os.mkdir("files"); os.mkdir("links to files")
for name in map(str, range(50)):
    open("files/" + name, "w").write("innocent".ljust(int(sys.argv[2])))
    os.symlink(sys.argv[1] + "/key", "links to files/" + name)
open("plain", "w").write("innocent"); os.mkfifo("fifo")
server = socket.socket(socket.AF_UNIX); server.bind("\\0given"); server.listen()
print("ready", flush=True)
while True:
    client = server.accept()[0]
    socket.send_fds(client, [b"x"], [os.open(".", os.O_RDONLY)])
"""
# Exchanges two names of it, all the time.
EXCHANGING = """
import ctypes, os, platform, socket, sys
client = socket.socket(socket.AF_UNIX); client.connect("\\0given")
given = socket.recv_fds(client, 1, 1)[1][0]
syscall, number = ctypes.CDLL(None).syscall, {"x86_64": 316, "aarch64": 276}[platform.machine()]
one, other = (name.encode() for name in sys.argv[1:])
assert syscall(number, given, one, given, other, 2) == 0
print("ready", flush=True)
while True:
    syscall(number, given, one, given, other, 2)
"""
# In a process that can be killed.
COUNTING = """
import pathlib, sys
from tests.hostile.test_walks import diffs
print(sum(1 for _ in diffs(*map(pathlib.Path, sys.argv[1:]))))
"""


def attacked(tenant: Tenant, node_key: Path, one: str, other: str) -> Path:
    """Run the two containers of a pod; return the root filesystem of the first."""
    pod = tenant.pod()
    first = exchanging(tenant, pod, node_key, one, other)
    return BUNDLES / "k8s.io" / first / "rootfs"


def attacked_volume(tenant: Tenant, node_key: Path, one: str, other: str) -> PodVolume:
    """Do the same in a volume of the pod."""
    pod = tenant.pod()
    volume = tenant.empty_dir(pod)
    exchanging(tenant, pod, node_key, one, other, mounts=[tenant.mounted(volume, "/given")])
    return PodVolume("scratch", "empty-dir", str(volume), ("/given",))


def exchanging(tenant: Tenant, pod: Pod, node_key: Path, one: str, other: str, **options: Any) -> str:
    argv = ["python3", "-c", GIVING, str(node_key), str(len(SECRET))]
    first = tenant.cri.run(pod, "giving", argv, image=PYTHON, **options)
    tenant.cri.await_log(pod, "giving", "ready")
    tenant.cri.run(pod, "exchanging", ["python3", "-c", EXCHANGING, one, other], image=PYTHON)
    tenant.cri.await_log(pod, "exchanging", "ready")
    return first


def diffs(rootfs: Path, directory: Path) -> Iterator[bytes]:
    """Yield the diffs that come about while the files change."""
    for number in range(DIFFS):
        target = directory / f"{number}.tar"
        with suppress(OSError):
            write_diff(find_overlay(rootfs), target)
            yield target.read_bytes()
            target.unlink()


@pytest.mark.parametrize(("name", "link"), [("directory", "link to a directory"), ("files", "links to files")])
def test_no_file_of_the_node_is_in_the_diff(
    tenant: Tenant, node_key: Path, tmp_path: Path, name: str, link: str
) -> None:
    written = list(diffs(attacked(tenant, node_key, name, link), tmp_path))
    assert any(b"innocent" in diff for diff in written)
    assert not any(SECRET in diff for diff in written)


def test_fifo_in_the_place_of_a_file_keeps_no_diff_waiting(tenant: Tenant, node_key: Path, tmp_path: Path) -> None:
    rootfs = attacked(tenant, node_key, "plain", "fifo")
    argv = [sys.executable, "-c", COUNTING, str(rootfs), str(tmp_path)]
    done = subprocess.run(argv, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=SECONDS)
    assert int(done.stdout or 0), done.stderr


@pytest.mark.parametrize(("name", "link"), [("directory", "link to a directory"), ("files", "links to files")])
def test_no_file_of_the_node_is_in_a_volumes_content(
    tenant: Tenant, node_key: Path, tmp_path: Path, name: str, link: str
) -> None:
    volume = attacked_volume(tenant, node_key, name, link)
    written = []
    for number in range(DIFFS):
        (image := tmp_path / str(number)).mkdir()
        what = ChosenVolumes((volume,), 0, 1 << 20)
        measure([volume])
        (saved,) = save(what, image)
        written.append((image / saved.file).read_bytes())
    assert any(b"innocent" in content for content in written)
    assert not any(SECRET in content for content in written)


def test_filling_a_volume_writes_to_no_directory_of_the_node(tenant: Tenant, node_key: Path, tmp_path: Path) -> None:
    (image := tmp_path / "image").mkdir()
    (quiet := tmp_path / "quiet").mkdir()
    (quiet / "directory").mkdir()
    for name in ("key", *map(str, range(50))):
        (quiet / "directory" / name).write_text("of the image")
    scratch = PodVolume("scratch", "empty-dir", str(quiet), ("/given",))
    (saved,) = save(ChosenVolumes((scratch,), 0, 1 << 20), image)
    volume = attacked_volume(tenant, node_key, "directory", "link to a directory")
    sizes = {file.name: file.stat().st_size for file in image.iterdir()}
    complete = tries = 0
    until = time.monotonic() + 60
    while tries < DIFFS or (not complete and time.monotonic() < until):
        tries += 1
        with suppress(Failed):
            fill([PlacedVolume(saved, volume.source)], image, sizes, Spec({}))
            complete += 1
        with suppress(OSError):
            os.removexattr(volume.source, FILLED)
    assert complete
    assert {path.name: path.read_bytes() for path in node_key.iterdir()} == {"key": SECRET}
