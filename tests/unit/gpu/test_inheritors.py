"""What a process holds of NVIDIA's devices is judged by what the kernel says: numbers of devices, and open files."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kybernate_shim.gpu.inheritors import Identity, Inheritors, Snapshot, judge, opens_devices, ticks
from kybernate_shim.linux.nvidia_devices import DeviceFiles, look, look_all, majors

TABLE = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
511 nvidia-uvm

Block devices:
  7 loop
259 blkext
"""
MEM = frozenset({(stat.S_IFCHR, 1)})  # stands for NVIDIA's: /dev/null and /dev/zero
OWNER, CHILD, GRANDCHILD = Identity(10, 100), Identity(20, 300), Identity(30, 400)


def test_majors_are_those_that_the_driver_registers() -> None:
    assert majors(TABLE) == {(stat.S_IFCHR, 195), (stat.S_IFCHR, 511)}
    assert majors("") == frozenset()


def test_descriptor_counts_by_its_device_and_not_by_its_name(tmp_path: Path) -> None:
    liar = tmp_path / "nvidia0"
    liar.touch()
    with liar.open("rb") as false, Path("/dev/zero").open("rb") as true:
        held = look(os.getpid(), MEM).descriptors
        assert true.fileno() in held
        assert false.fileno() not in held


def test_look_ends_in_time() -> None:
    with pytest.raises(TimeoutError, match=str(os.getpid())):
        look_all([os.getpid()], MEM, seconds=-1)


def test_child_of_an_owner_inherits_what_that_had_before() -> None:
    owners = {OWNER: Snapshot(200, frozenset({3, 4}))}
    assert judge(CHILD, OWNER, owners, {}) == {3, 4}
    assert judge(Identity(20, 150), OWNER, owners, {}) == frozenset()  # forked before the owner was seen: unproven
    assert judge(CHILD, Identity(10, 999), owners, {}) == frozenset()  # another process with the parent's pid
    assert judge(CHILD, None, owners, {CHILD: frozenset({3})}) == {3}
    assert judge(GRANDCHILD, CHILD, {}, {CHILD: frozenset({3})}) == {3}
    assert judge(GRANDCHILD, CHILD, {}, {}) == frozenset()


@pytest.fixture
def child() -> Iterator[tuple[int, int, int]]:
    """A forked child: its pid, a descriptor that it has inherited, and one that it has opened under our number."""
    shared, other = os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_RDONLY)
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open("/dev/null", os.O_RDONLY), other)
        os.write(go, b"!")
        signal.pause()
    os.read(ready, 1)
    yield pid, shared, other
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for fd in (shared, other, ready, go):
        os.close(fd)


def test_descriptor_is_proven_only_by_the_same_open_file(child: tuple[int, int, int]) -> None:
    pid, shared, other = child
    both = frozenset({shared, other})
    inheritors, late = Inheritors(), ticks() + 1000
    inheritors.observe([DeviceFiles(os.getpid(), (), both)], [DeviceFiles(pid, (), both)], late)
    assert inheritors.inherited(pid) == {shared}


@pytest.mark.parametrize(("library", "all_of_it"), [("libcuda.so.1", True), ("libnvidia-ml.so.580.1", False)])
def test_descriptor_that_the_driver_had_for_a_moment_is_inherited(
    child: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, library: str, all_of_it: bool
) -> None:
    """Only another library could have opened it: the driver refuses to work where something is inherited."""
    pid, shared, other = child
    both = frozenset({shared, other})
    maps = [SimpleNamespace(name=f"/usr/lib/{library}")]
    monkeypatch.setattr("kybernate_shim.gpu.inheritors.read_maps", lambda _: maps)
    inheritors, late = Inheritors(), ticks() + 1000
    inheritors.observe([DeviceFiles(os.getpid(), (), frozenset({shared}))], [DeviceFiles(pid, (), both)], late)
    assert inheritors.inherited_of(DeviceFiles(pid, (), both)) == (both if all_of_it else {shared})
    assert inheritors.inherited_of(DeviceFiles(os.getpid(), (), both)) == frozenset()  # nothing of it is proven


@pytest.mark.parametrize(
    ("name", "opens"),
    [
        *((name, True) for name in ("libnvidia-ml.so.1", "libEGL_nvidia.so.0", "libnvidia-opencl.so.1")),
        *((name, False) for name in ("libcuda.so.1", "libnvidia-ptxjitcompiler.so.1", "libcudart.so.12", "libc.so.6")),
    ],
)
def test_libraries_that_open_devices(monkeypatch: pytest.MonkeyPatch, name: str, opens: bool) -> None:
    monkeypatch.setattr("kybernate_shim.gpu.inheritors.read_maps", lambda _: [SimpleNamespace(name=f"/lib/{name}")])
    assert opens_devices(os.getpid()) is opens


def test_proofs_outlive_the_files_of_the_owner(child: tuple[int, int, int]) -> None:
    pid, shared, _ = child
    inheritors, late, held = Inheritors(), ticks() + 1000, frozenset({shared})
    inheritors.observe([DeviceFiles(os.getpid(), (), held)], [DeviceFiles(pid, (), held)], late)
    inheritors.observe([DeviceFiles(os.getpid())], [DeviceFiles(pid, (), held)], late)
    assert inheritors.inherited(pid) == {shared}


def forks_and_waits(*fds: int) -> tuple[int, int]:
    """Fork a child that forks one itself; return both pids."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        if (below := os.fork()) == 0:
            signal.pause()
        os.write(told, str(below).encode())
        signal.pause()
    below = int(os.read(ready, 20))
    for fd in (*fds, ready, told):
        os.close(fd)
    return pid, below


def test_children_of_those_that_were_forked_late_have_inherited_too() -> None:
    owner, inheritors = os.open("/dev/null", os.O_RDONLY), Inheritors()
    inheritors.observe([DeviceFiles(os.getpid(), (), frozenset({owner}))], [], 0)
    child, grandchild = forks_and_waits(owner)
    try:
        assert inheritors.inherited(grandchild) == frozenset()
        inheritors.follow([grandchild, child])  # in whatever order the kernel lists them
        assert inheritors.inherited(child) == inheritors.inherited(grandchild) == {owner}
    finally:
        for pid in (grandchild, child):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(child, 0)


def test_proof_by_a_parent_outlives_it() -> None:
    owner, inheritors = os.open("/dev/null", os.O_RDONLY), Inheritors()
    inheritors.observe([DeviceFiles(os.getpid(), (), frozenset({owner}))], [], 0)
    child, grandchild = forks_and_waits(owner)
    inheritors.follow([child, grandchild])
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert inheritors.inherited(grandchild) == {owner}
    os.kill(grandchild, signal.SIGKILL)
