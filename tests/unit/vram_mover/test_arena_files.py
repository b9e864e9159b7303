"""The arena's part of an image: byte for byte out and back, into whatever part is free, and never half."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from kybernate_shim.arena import banks
from kybernate_shim.arena.banks import Bank
from kybernate_shim.arena.control import MOST_BLOCKS, MOST_BYTES
from kybernate_shim.arena.errors import ArenaIncomplete
from kybernate_shim.arena.extents import HOLE, Extent, Kept
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.pieces import MARK, PieceHashes
from kybernate_shim.sizes import GRAIN
from kybernate_shim.vram_io.errors import FileFailed, NotInArena, VramError
from kybernate_shim.vram_io.image_files import ArenaBlock, ArenaFile, ArenaHole
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover import arena_files

SIZE = 16 * GRAIN
SIZES = [(0, 0x100000, 2 * GRAIN), (7, 0x900000, GRAIN), (8, 0xF00000, 3 * GRAIN)]
BLOCKS = tuple(ArenaBlock(*block) for block in SIZES)
TOTAL = 6 * GRAIN
TWO = CopyOptions(threads=2)


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    """An arena in a plain directory, full of what others have left there."""
    (tmp_path / "arena").mkdir()
    found = Memory(SIZE, tmp_path / "arena")
    found.file.write_bytes(b"x" * SIZE)
    return found


@pytest.fixture(autouse=True)
def unmounted() -> Iterator[None]:
    with patch.object(Memory, "prepare"):
        yield


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "100"]) as child:
        yield child.pid
        child.kill()


def loaded(memory: Memory, files: list[ArenaFile], directory: Path, how: CopyOptions) -> list[list[Kept]]:
    shares = arena_files.claim(memory, files)
    arena_files.load(memory, files, shares, directory, how)
    return shares


def test_room_near_the_gpu_is_claimed_first(memory: Memory) -> None:
    half = SIZE // 2
    banks.write(memory.file.with_name("banks"), [Bank(0, Extent(0, half)), Bank(1, Extent(half, half))])
    files = [ArenaFile(1, "file", TOTAL, TOTAL, "", BLOCKS)] * 2
    first, second = arena_files.claim(memory, files, 1)
    assert [extent for kept in (*first, *second) for extent in kept.extents] == [
        Extent(half, 2 * GRAIN),
        Extent(half + 2 * GRAIN, GRAIN),
        Extent(half + 3 * GRAIN, 3 * GRAIN),
        Extent(half + 6 * GRAIN, 2 * GRAIN),
        Extent(0, GRAIN),
        Extent(GRAIN, 3 * GRAIN),
    ]


def put(memory: Memory, pid: int) -> bytes:
    """Let the arena have bytes of a process, in pieces here and there, some of them zeros; return them in order."""
    taken = [ArenaOwner(1 << 30, number) for number in range(3)]
    with patch.object(ArenaOwner, "alive", True):
        for number, owner in enumerate(taken):
            memory.claim(owner, [(0, 0, (number + 1) * GRAIN)])
        memory.give_up(taken[0])
        memory.give_up(taken[2])
        kept = memory.claim(ArenaOwner.of(pid), SIZES).kept
        memory.confirm(ArenaOwner.of(pid), kept)
        memory.give_up(taken[1])
    assert any(len(one.extents) > 1 for one in kept)
    content = os.urandom(GRAIN) + bytes(GRAIN) + os.urandom(GRAIN + 4096) + bytes(TOTAL - 3 * GRAIN - 4096)
    assert read(memory, pid, content) != content
    return content


def put_with_holes(memory: Memory, pid: int) -> bytes:
    """Let the arena have bytes of a process of which it knows some to be zeros; return them in order."""
    content = os.urandom(GRAIN) + bytes(GRAIN) + os.urandom(GRAIN + 4096) + bytes(TOTAL - 3 * GRAIN - 4096)
    bits = [any(content[at : at + GRAIN]) for at in range(0, TOTAL, GRAIN)]
    seen, at = [], 0
    for _, _, size in SIZES:
        count = size // GRAIN
        seen.append(PieceHashes(bytes(count * MARK), bits[at : at + count]))
        at += count
    memory.confirm(ArenaOwner.of(pid), memory.update(ArenaOwner.of(pid), SIZES, seen).kept)
    assert read(memory, pid, content) != content
    return content


def read(memory: Memory, pid: int, content: bytes = b"") -> bytes:
    """Return what the arena has of a process, and then put `content` in its place."""
    found, at = b"", 0
    with memory.file.open("r+b") as file:
        for extent in (extent for one in memory.kept(ArenaOwner.of(pid)) for extent in one.extents):
            if extent.is_hole:
                found += bytes(extent.size)
                at += extent.size
                continue
            file.seek(extent.start)
            found += file.read(extent.size)
            if content:
                file.seek(extent.start)
                file.write(content[at : at + extent.size])
                at += extent.size
    return found


@pytest.mark.parametrize(
    "how", [CopyOptions(threads=1), CopyOptions(threads=8), CopyOptions(threads=3, piece_bytes=3 << 20)]
)
def test_bytes_go_out_and_back(memory: Memory, process: int, tmp_path: Path, how: CopyOptions) -> None:
    content = put(memory, process)
    one = arena_files.save(memory, memory.kept(ArenaOwner.of(process)), tmp_path / "file", how, pid=1)
    assert (one.file, one.size, one.blocks) == ("file", TOTAL, BLOCKS)
    assert (tmp_path / "file").read_bytes() == content
    assert (tmp_path / "file").stat().st_blocks * 512 <= one.data_bytes < 3 * GRAIN
    assert read(memory, process) == content

    shares = loaded(memory, [one], tmp_path, how)
    memory.give_up(ArenaOwner.of(process))
    arena_files.hand_over(memory, {process: shares[0]})
    assert read(memory, process) == content
    assert [(kept.index, kept.address, kept.size) for kept in memory.kept(ArenaOwner.of(process))] == SIZES
    assert memory.kept(ArenaOwner.of(os.getpid())) == []
    assert memory.free() == SIZE - TOTAL


@pytest.mark.parametrize("how", [CopyOptions(threads=1), CopyOptions(threads=8, piece_bytes=3 << 20)])
def test_holes_need_no_room_on_the_way(memory: Memory, process: int, tmp_path: Path, how: CopyOptions) -> None:
    content = put_with_holes(memory, process)
    kept = memory.kept(ArenaOwner.of(process))
    one = arena_files.save(memory, kept, tmp_path / "file", how, pid=1)
    assert one.holes == (ArenaHole(GRAIN, GRAIN), ArenaHole(4 * GRAIN, 2 * GRAIN))
    assert (tmp_path / "file").read_bytes() == content
    assert memory.free() == SIZE - 3 * GRAIN
    memory.give_up(ArenaOwner.of(process))
    memory.claim(ArenaOwner.of(os.getppid()), [(0, 0, SIZE - 3 * GRAIN)])
    (share,) = loaded(memory, [one], tmp_path, how)
    arena_files.hand_over(memory, {process: share})
    assert read(memory, process) == content
    assert memory.kept(ArenaOwner.of(process))[0].extents[1] == Extent(HOLE, GRAIN)
    assert memory.free() == 0


def test_hole_that_has_data_is_found(memory: Memory, process: int, tmp_path: Path) -> None:
    put(memory, process)
    one = arena_files.save(memory, memory.kept(ArenaOwner.of(process)), tmp_path / "file", CopyOptions(), pid=1)
    with pytest.raises(VramError, match="where it should have zeros"):
        loaded(memory, [replace(one, holes=(ArenaHole(0, GRAIN),))], tmp_path, CopyOptions())
    assert memory.kept(ArenaOwner.of(os.getpid())) == []


@pytest.mark.parametrize("hole", [(1, GRAIN), (0, GRAIN - 1), (-GRAIN, GRAIN), (TOTAL - GRAIN, 2 * GRAIN)])
def test_holes_that_are_none_are_refused(memory: Memory, tmp_path: Path, hole: tuple[int, int]) -> None:
    with pytest.raises(VramError, match="which is not made of whole pieces"):
        loaded(memory, [ArenaFile(1, "file", TOTAL, 0, "", BLOCKS, (ArenaHole(*hole),))], tmp_path, CopyOptions())


@pytest.mark.parametrize("threads", [1, 8])
def test_bytes_are_told_to_be_there_only_when_they_are(
    memory: Memory, process: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    content = put(memory, process)
    one = arena_files.save(memory, memory.kept(ArenaOwner.of(process)), tmp_path / "file", CopyOptions(), pid=1)
    memory.give_up(ArenaOwner.of(process))
    with memory.file.open("r+b") as file:
        file.write(os.urandom(SIZE))
    monkeypatch.setattr(arena_files, "FRONT_BYTES", GRAIN)
    files = [one, one]
    shares = arena_files.claim(memory, files)
    extents = [extent for share in shares for kept in share for extent in kept.extents]
    told: list[int] = []

    def fill(owner: ArenaOwner, size: int) -> None:
        data = memory.file.read_bytes()
        found = b"".join(data[extent.start : extent.end] for extent in extents)
        assert found[:size] == (2 * content)[:size]
        told.append(size)

    with patch.object(memory, "fill", fill):
        arena_files.load(memory, files, shares, tmp_path, CopyOptions(threads=threads, piece_bytes=GRAIN))
    assert told == sorted(told)
    assert len(told) >= 2  # the end of each file, at least
    assert told[-1] == 2 * TOTAL


def test_several_processes_get_each_their_own(memory: Memory, process: int, tmp_path: Path) -> None:
    content = put(memory, process)
    one = arena_files.save(
        memory, memory.kept(ArenaOwner.of(process)), tmp_path / "file", CopyOptions(threads=2), pid=1
    )
    memory.give_up(ArenaOwner.of(process))
    with subprocess.Popen(["sleep", "100"]) as other:
        first, second = loaded(memory, [one, one], tmp_path, CopyOptions(threads=2))
        arena_files.hand_over(memory, {process: first, other.pid: second})
        assert read(memory, process) == read(memory, other.pid) == content
        assert memory.free() == SIZE - 2 * TOTAL
        other.kill()
    assert memory.free() == SIZE - TOTAL


def damaged(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(GRAIN // 2)
        file.write(b"!")


def shortened(path: Path) -> None:
    os.truncate(path, TOTAL - 1)


@pytest.mark.parametrize(("harm", "error"), [(damaged, VramError), (shortened, VramError), (Path.unlink, FileFailed)])
def test_harm_is_found_and_nothing_is_kept(
    memory: Memory, process: int, tmp_path: Path, harm: object, error: type[Exception]
) -> None:
    put(memory, process)
    one = arena_files.save(memory, memory.kept(ArenaOwner.of(process)), tmp_path / "file", CopyOptions(), pid=1)
    assert callable(harm)
    harm(tmp_path / "file")
    with pytest.raises(error):
        loaded(memory, [one], tmp_path, CopyOptions())
    assert memory.kept(ArenaOwner.of(os.getpid())) == []


@pytest.mark.parametrize("blocks", [((0, 0, TOTAL - GRAIN),), ((0, 0, TOTAL - 1), (1, TOTAL, 1)), ()])
def test_blocks_that_are_none_are_refused(tmp_path: Path, blocks: tuple[tuple[int, int, int], ...]) -> None:
    file = ArenaFile(1, "file", TOTAL, TOTAL, "", tuple(ArenaBlock(*block) for block in blocks))
    with pytest.raises(VramError, match="does not consist of blocks"):
        loaded(Memory(SIZE, tmp_path), [file], tmp_path, CopyOptions())


def test_arena_without_the_room_says_so(memory: Memory, process: int, tmp_path: Path) -> None:
    put(memory, process)
    one = arena_files.save(memory, memory.kept(ArenaOwner.of(process)), tmp_path / "file", CopyOptions(), pid=1)
    with pytest.raises(VramError, match="24 MiB of VRAM do not fit"):
        loaded(memory, [one, one], tmp_path, CopyOptions())
    assert memory.free() == SIZE - TOTAL


def test_cancelled_save_leaves_no_file(memory: Memory, process: int, tmp_path: Path) -> None:
    content = put(memory, process)
    how = CopyOptions(threads=1)
    how.cancel.set()
    with pytest.raises(VramError, match="cancelled"):
        arena_files.save(memory, memory.kept(ArenaOwner.of(process)), tmp_path / "file", how, pid=1)
    assert not (tmp_path / "file").exists()
    assert read(memory, process) == content


def test_bytes_of_a_process_that_ends_meanwhile_stay_until_they_are_saved(memory: Memory, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        content = put(memory, child.pid)
        held = arena_files.hold(memory, [child.pid])
        child.kill()
    assert memory.free() == SIZE - TOTAL
    arena_files.save(memory, held[child.pid], tmp_path / "file", CopyOptions(), pid=1)
    assert (tmp_path / "file").read_bytes() == content
    arena_files.let_go(memory)
    assert memory.free() == SIZE


def test_room_that_was_not_loaded_is_not_handed_over(memory: Memory, process: int, tmp_path: Path) -> None:
    put(memory, process)
    one = arena_files.save(memory, memory.kept(ArenaOwner.of(process)), tmp_path / "file", CopyOptions(), pid=1)
    memory.give_up(ArenaOwner.of(process))
    (share,) = arena_files.claim(memory, [one])
    arena_files.hand_over(memory, {process: share})
    assert memory.kept(ArenaOwner.of(process)) == []
    assert memory.filled(ArenaOwner.of(os.getpid())) == 0
    with pytest.raises(
        VramError,
        match=r"must not run|is not a digest of a saved region",
    ):
        arena_files.load(memory, [replace(one, digest=one.digest[:-1] + "_")], [share], tmp_path, CopyOptions())
    with pytest.raises(ArenaIncomplete):
        memory.filled(ArenaOwner.of(os.getpid()))
    with pytest.raises(NotInArena):
        arena_files.hand_over(memory, {process: share})


def test_bytes_that_were_not_copied_are_not_held_for_an_image(memory: Memory, process: int) -> None:
    kept = memory.claim(ArenaOwner.of(process), SIZES).kept
    memory.confirm(ArenaOwner.of(process), kept, slice(0, 2))
    with pytest.raises(NotInArena, match=f"6 MiB of process {process} were never copied to the arena"):
        arena_files.hold(memory, [process])
    assert memory.kept(ArenaOwner.of(os.getpid())) == []


@pytest.mark.parametrize(
    "blocks",
    [
        [(0, 0, -GRAIN), (1, 0, TOTAL + GRAIN)],
        [(0, 0, GRAIN), (0, 0, TOTAL - GRAIN)],
        [(MOST_BLOCKS, 0, TOTAL)],
        [(number, 0, MOST_BYTES) for number in range(2)],
    ],
)
def test_blocks_that_no_process_can_have_are_refused(
    memory: Memory, tmp_path: Path, blocks: list[tuple[int, int, int]]
) -> None:
    """Before anything is allocated by their number or sizes."""
    size = sum(size for _, _, size in blocks)
    with pytest.raises(VramError, match=r"file (has blocks that no process can have|does not consist of blocks)"):
        arena_files.claim(memory, [ArenaFile(1, "file", size, 0, "", tuple(ArenaBlock(*block) for block in blocks))])
    assert memory.free() == SIZE


def test_sealed_file_is_the_same_to_who_has_the_key_alone(memory: Memory, process: int, tmp_path: Path) -> None:
    owner = ArenaOwner.of(process)
    half = PieceHashes(bytes(2 * MARK), b"\1\0")  # its second piece is zeros, and a hole
    looks = [half, *(PieceHashes(bytes(size // GRAIN * MARK), b"\1" * (size // GRAIN)) for _, _, size in SIZES[1:])]
    kept = memory.update(owner, SIZES, looks).kept
    content = os.urandom(SIZE)
    memory.file.write_bytes(content)
    memory.confirm(owner, kept)
    key = CopyOptions(threads=2, key=os.urandom(32))
    held = arena_files.hold(memory, [process])[process]
    saved = arena_files.save(memory, held, tmp_path / "file", key, pid=process)
    arena_files.let_go(memory)
    written = (tmp_path / "file").read_bytes()
    assert (len(written), saved.data_bytes) == (TOTAL, TOTAL - GRAIN)
    plain = b"".join(
        content[one.start : one.end] if not one.is_hole else bytes(one.size) for block in kept for one in block.extents
    )
    assert written[GRAIN : 2 * GRAIN] == bytes(GRAIN)
    for at in range(0, TOTAL, 4096):
        assert plain[at : at + 4096] == bytes(4096) or plain[at : at + 4096] != written[at : at + 4096]

    memory.file.write_bytes(b"x" * SIZE)
    (share,) = loaded(memory, [saved], tmp_path, key)
    now = memory.file.read_bytes()
    back = b"".join(
        now[one.start : one.end] if not one.is_hole else bytes(one.size) for block in share for one in block.extents
    )
    assert back == plain
    with pytest.raises(VramError, match=r"does not hold|zeros"):
        loaded(memory, [saved], tmp_path, replace(key, key=os.urandom(32)))
    with pytest.raises(VramError, match=r"does not hold|zeros"):
        loaded(memory, [saved], tmp_path, TWO)
