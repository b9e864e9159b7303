"""CRIU's image files, as CRIU 4 writes them, and as a full disk leaves them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.criu import images as criu_images
from kybernate_shim.checkpoint.criu.images import COMMON, SERVICE, DumpedMount, DumpStats
from kybernate_shim.checkpoint.image.manifest import ImageProcess
from kybernate_shim.errors import Damaged
from kybernate_shim.messages import criu_pb2 as criu


def write(path: Path, magics: tuple[int, ...], *entries: bytes) -> None:
    content = struct.pack(f"<{len(magics)}I", *magics)
    path.write_bytes(content + b"".join(struct.pack("<I", len(entry)) + entry for entry in entries))


def images(directory: Path) -> Path:
    """Two processes; the second is a zombie without memory."""
    tree = [criu.Process(pid=1, threads=[1, 7]), criu.Process(pid=12, ppid=1, threads=[12])]
    write(directory / "pstree.img", (COMMON, criu_images.PSTREE), *(entry.SerializeToString() for entry in tree))
    for pid, name in ((1, "sh"), (12, "sleep")):
        core = criu.Core(architecture=criu.Core.X86_64, task=criu.Task(state=1, name=name))
        write(directory / f"core-{pid}.img", (COMMON, criu_images.CORE), core.SerializeToString())
    maps = [
        criu.PagemapHead(pages_id=1),
        criu.Pagemap(address=0x1000, short_pages=3),
        criu.Pagemap(address=0x9000, short_pages=1, pages=2**32 + 1),
    ]
    write(directory / "pagemap-1.img", (COMMON, criu_images.PAGEMAP), *(entry.SerializeToString() for entry in maps))
    return directory


def test_processes_have_name_and_memory(tmp_path: Path) -> None:
    found = criu_images.processes(images(tmp_path), page_size=4096)
    assert found == (ImageProcess(1, "sh", (3 + 2**32 + 1) * 4096), ImageProcess(12, "sleep", 0))


def test_mounts_have_type_and_key(tmp_path: Path) -> None:
    entries = [
        criu.Mount(type=17, id=1, mountpoint="/"),
        criu.Mount(type=5, id=2, parent=1, mountpoint="/dev", root="/"),
        criu.Mount(type=0, id=3, parent=1, mountpoint="/data", root="/vol", key="/data", type_name="xfs"),
        criu.Mount(type=16, id=4, parent=1, mountpoint="/odd"),
    ]
    write(tmp_path / "mountpoints-9.img", (COMMON, criu_images.MOUNTS), *(e.SerializeToString() for e in entries))
    assert criu_images.mounts(tmp_path) == (
        DumpedMount("/dev", "tmpfs", "", "/", 2, 1),
        DumpedMount("/data", "xfs", "/data", "/vol", 3, 1),
        DumpedMount("/odd", "type 16", "", "", 4, 1),
    )


@pytest.mark.parametrize(("types", "found"), [([], False), ([1, 2, 5], False), ([1, 4, 5], True)])
def test_sockets_of_the_internet_are_found_among_the_files(tmp_path: Path, types: list[int], found: bool) -> None:
    entries = [criu.File(type=kind, id=number).SerializeToString() for number, kind in enumerate(types)]
    write(tmp_path / "files.img", (COMMON, criu_images.FILES), *entries)
    assert criu_images.has_internet_sockets(tmp_path) == found


def test_statistics_are_read(tmp_path: Path) -> None:
    entry = criu.Stats(dump=criu.DumpStats(frozen_us=215_900, pages_scanned=49, pages_written=33))
    write(tmp_path / "stats-dump", (SERVICE, criu_images.STATS), entry.SerializeToString())
    assert criu_images.stats(tmp_path / "stats-dump") == DumpStats(215, 49, 33)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (images(tmp_path) / "core-12.img").unlink()
    with pytest.raises(Damaged, match=r"core-12\.img: No such file"):
        criu_images.processes(tmp_path)


@pytest.mark.parametrize("cut", [0, 3, 7, 9, 11, 14])
def test_a_cut_file_is_named(tmp_path: Path, cut: int) -> None:
    path = images(tmp_path) / "pstree.img"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(Damaged, match=r"pstree\.img"):
        criu_images.processes(tmp_path)


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (images(tmp_path) / "core-1.img").replace(tmp_path / "pstree.img")
    with pytest.raises(Damaged, match="not the CRIU image that its name indicates"):
        criu_images.processes(tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    directory = tmp_path_factory.mktemp("any")
    head = struct.pack("<2I", COMMON, criu_images.MOUNTS)
    (directory / "mountpoints-1.img").write_bytes(head + tail)
    try:
        criu_images.mounts(directory)
    except Damaged as error:
        assert "mountpoints-1.img" in str(error)  # noqa: PT017  (short tails may be valid)
