"""CPUs and devices by the memory that is near them, and where pages come from."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest

from kybernate_shim.linux.numa import (
    memory_of_nodes,
    node_of_device,
    parse_list,
    prefer,
    processors_near,
    processors_of,
)
from kybernate_shim.sizes import NO_NODE


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})]
)
def test_lists_of_the_kernel_are_read(text: str, numbers: set[int]) -> None:
    assert parse_list(text) == numbers


def nodes(folder: Path, *lists: str) -> Path:
    for number, text in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{text}\n")
    return folder


def test_only_the_threads_own_node_is_near(tmp_path: Path) -> None:
    ours = os.sched_getaffinity(0)
    here = min(ours)
    os.sched_setaffinity(0, {here})
    try:
        found = processors_near(os.getpid(), nodes(tmp_path, f"{here}", f"{here + 1}-4095"))
    finally:
        os.sched_setaffinity(0, ours)
    assert found == {here}


def test_without_a_node_that_is_ours_all_processors_are_as_near(tmp_path: Path) -> None:
    ours = os.sched_getaffinity(0)
    assert processors_near(os.getpid(), nodes(tmp_path)) == ours
    assert processors_near(2**22 + 1) == ours


def test_this_machine_has_processors_near_us() -> None:
    assert processors_near(os.getpid()) <= os.sched_getaffinity(0)
    assert processors_near(os.getpid())


def test_memory_of_nodes_is_told_in_bytes(tmp_path: Path) -> None:
    for node, text in ((0, "Node 0 MemTotal:       1024 kB\nNode 0 MemFree: 7 kB\n"), (12, "Node 12 MemTotal: 0 kB\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "meminfo").write_text(text)
    assert memory_of_nodes(tmp_path) == {0: 1 << 20, 12: 0}
    assert memory_of_nodes(tmp_path / "none") == {}


def test_device_is_near_the_node_that_the_bus_names(tmp_path: Path) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text("1\n")
    assert node_of_device("0000:1B:00.0", tmp_path) == 1
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text("-1\n")
    assert node_of_device("0000:1B:00.0", tmp_path) == NO_NODE
    assert node_of_device("0000:1C:00.0", tmp_path) == NO_NODE


def test_processors_of_a_node_are_those_that_we_may_use(tmp_path: Path) -> None:
    ours = os.sched_getaffinity(0)
    here = min(ours)
    nodes(tmp_path, f"{here}", "4000-4095")
    assert processors_of(0, tmp_path) == {here}
    assert processors_of(1, tmp_path) == processors_of(2, tmp_path) == ours


def policy_at(address: int) -> str:
    (line,) = re.findall(rf"^{address:x} (.+)$", Path("/proc/self/numa_maps").read_text(), re.MULTILINE)
    return str(line.split()[0])


def test_preference_stays_with_a_file_for_whoever_maps_it() -> None:
    fd = os.memfd_create("bank")
    try:
        os.ftruncate(fd, 4 * mmap.PAGESIZE)
        for prefers in (True, False):
            with mmap.mmap(fd, 4 * mmap.PAGESIZE) as pages:
                anchor = ctypes.c_char.from_buffer(pages)
                address = ctypes.addressof(anchor)
                if prefers:
                    prefer(address, 4 * mmap.PAGESIZE, 0)
                assert policy_at(address) == "prefer:0"
                del anchor
    finally:
        os.close(fd)


def test_preference_for_a_node_that_is_not_there_is_an_error() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as pages:
        anchor = ctypes.c_char.from_buffer(pages)
        with pytest.raises(OSError, match="Invalid argument"):
            prefer(ctypes.addressof(anchor), mmap.PAGESIZE, 1000)
        del anchor
