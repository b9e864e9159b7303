"""The data path on real processes with plain memory: what goes out comes back, whatever the shape of the regions."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux import process_memory
from kybernate_shim.linux.process_memory import Region
from kybernate_shim.vram_io import buffers, digest, file_digests, files, thread_pool
from kybernate_shim.vram_io.buffers import BLOCK_BYTES, Buffer
from kybernate_shim.vram_io.saved_regions import SavedRegion, file_name, total_bytes
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover.load import FilePrefetch, load, put_back
from kybernate_shim.vram_mover.save import save
from tests.fakes.memory_process import MemoryProcess

MIB = 1 << 20
SIZE = 12 * MIB + 4096 * 3  # no multiple of a piece or a block


@pytest.fixture
def target() -> Iterator[MemoryProcess]:
    with MemoryProcess() as process:
        yield process


def filled(target: MemoryProcess, name: str = "a", size: int = SIZE) -> Region:
    """Map a region in `target`: data, a hole of 4 MiB and a bit, data to the end."""
    region = target.region(name, size)
    target.fill(name, 0, size // 3, seed=len(name))
    target.fill(name, size // 3 + 4 * MIB + 5000, size, seed=2)
    return region


def zeroed(target: MemoryProcess, region: Region) -> bool:
    return target.resident_kib(region) == 0


@pytest.mark.parametrize("threads", range(1, 17))
def test_bytes_come_back_with_any_number_of_threads(target: MemoryProcess, tmp_path: Path, threads: int) -> None:
    how = CopyOptions(threads=threads, piece_bytes=MIB)
    region = filled(target)
    before = target.digest("a")
    saved = save(target.pid, [region], tmp_path, ["v"], how)
    target.drop(saved)
    assert zeroed(target, region)
    load(target.pid, saved, tmp_path, how)
    assert target.digest("a") == before


def test_several_regions_come_back_each_to_its_place(target: MemoryProcess, tmp_path: Path) -> None:
    names = ["a", "bb", "ccc"]
    regions = [filled(target, name, SIZE + index * 4096) for index, name in enumerate(names)]
    before = [target.digest(name) for name in names]
    saved = save(target.pid, regions, tmp_path, [file_name(7, index) for index in range(3)])
    assert [region.file for region in saved] == [f"kybernate-vram-7-{index}.bin" for index in range(3)]
    assert total_bytes(saved) == sum(region.size for region in regions)
    target.drop(saved)
    load(target.pid, list(reversed(saved)), tmp_path)
    assert [target.digest(name) for name in names] == before


def test_several_processes_are_saved_and_loaded_side_by_side(tmp_path: Path) -> None:
    def cycle(target: MemoryProcess, region: Region) -> None:
        saved = save(
            target.pid, [region], tmp_path, [file_name(target.pid, 0)], CopyOptions(threads=2, piece_bytes=MIB)
        )
        target.drop(saved)
        load(target.pid, saved, tmp_path)

    with MemoryProcess() as one, MemoryProcess() as two:
        targets = [(one, filled(one)), (two, filled(two, "bb"))]
        before = [one.digest("a"), two.digest("bb")]
        threads = [threading.Thread(target=cycle, args=each) for each in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.digest("a"), two.digest("bb")] == before


def test_zeros_are_holes_and_stay_unwritten_in_the_target(target: MemoryProcess, tmp_path: Path) -> None:
    region = target.region("a", 16 * MIB)
    target.fill("a", 5 * MIB, 5 * MIB + 1)
    [saved] = save(target.pid, [region], tmp_path, ["v"], CopyOptions(piece_bytes=MIB))
    status = (tmp_path / "v").stat()
    assert (status.st_size, saved.data_bytes) == (16 * MIB, BLOCK_BYTES)
    assert status.st_blocks * 512 <= BLOCK_BYTES + 4096
    target.drop([saved])
    load(target.pid, [saved], tmp_path, huge_pages=False)
    assert target.resident_kib(region) == BLOCK_BYTES // 1024


def test_target_with_other_content_gets_the_zeros_too(target: MemoryProcess, tmp_path: Path) -> None:
    region = filled(target)
    before = target.digest("a")
    saved = save(target.pid, [region], tmp_path, ["v"])
    target.fill("a", 0, SIZE, seed=9)
    load(target.pid, saved, tmp_path, target_is_zero=False)
    assert target.digest("a") == before


def test_region_without_a_byte_of_data_needs_no_space(target: MemoryProcess, tmp_path: Path) -> None:
    region = target.region("a", 64 * MIB)
    [saved] = save(target.pid, [region], tmp_path, ["v"])
    assert saved.data_bytes == (tmp_path / "v").stat().st_blocks == 0
    load(target.pid, [saved], tmp_path)
    assert saved.digest == file_digests.of_file(tmp_path / "v", digest.piece_bytes_of(saved.digest), CopyOptions())


@pytest.mark.parametrize("direct", [True, False])
def test_direct_and_plain_files_are_the_same(target: MemoryProcess, tmp_path: Path, direct: bool) -> None:
    """Where the filesystem has no direct I/O, asking for it changes nothing."""
    region = filled(target)
    before = target.digest("a")
    saved = save(target.pid, [region], tmp_path, ["v"], CopyOptions(threads=2, piece_bytes=MIB, direct=direct))
    target.drop(saved)
    load(target.pid, saved, tmp_path, CopyOptions(threads=2, direct=direct))
    assert target.digest("a") == before


def test_file_may_lose_its_holes_on_the_way(target: MemoryProcess, tmp_path: Path) -> None:
    region = filled(target)
    before = target.digest("a")
    saved = save(target.pid, [region], tmp_path, ["v"], CopyOptions(piece_bytes=MIB))
    (tmp_path / "w").write_bytes((tmp_path / "v").read_bytes())
    (tmp_path / "w").replace(tmp_path / "v")
    target.drop(saved)
    load(target.pid, saved, tmp_path, huge_pages=False)
    assert target.digest("a") == before
    assert target.resident_kib(region) < SIZE // 1024 - 3 * 1024


def test_files_are_for_root_only(target: MemoryProcess, tmp_path: Path) -> None:
    save(target.pid, [target.region("a", MIB)], tmp_path, ["v"])
    assert (tmp_path / "v").stat().st_mode & 0o777 == 0o600


def test_put_back_undoes_a_drop_of_any_part(target: MemoryProcess, tmp_path: Path) -> None:
    region = filled(target)
    before = target.digest("a")
    saved = save(target.pid, [region], tmp_path, ["v"])
    part = SavedRegion("v", region.start + 2 * MIB, 4 * MIB, 0, "")
    target.drop([part])
    assert target.digest("a") != before
    put_back(target.pid, saved, tmp_path)
    assert target.digest("a") == before


def test_progress_counts_every_byte_once_and_never_goes_back(target: MemoryProcess, tmp_path: Path) -> None:
    seen: list[int] = []
    how = CopyOptions(threads=4, piece_bytes=MIB, on_progress=seen.append)
    region = filled(target)
    saved = save(target.pid, [region], tmp_path, ["v"], how)
    assert seen == sorted(seen)
    assert (len(seen), seen[-1]) == (13, SIZE)
    seen.clear()
    load(target.pid, saved, tmp_path, how, target_is_zero=False)
    assert seen == sorted(seen)
    assert seen[-1] == SIZE


def test_pieces_of_the_load_are_those_of_the_save(target: MemoryProcess, tmp_path: Path) -> None:
    region = filled(target)
    before = target.digest("a")
    saved = save(target.pid, [region], tmp_path, ["v"], CopyOptions(piece_bytes=2 * MIB))
    target.drop(saved)
    load(target.pid, saved, tmp_path, CopyOptions(piece_bytes=BLOCK_BYTES))
    assert target.digest("a") == before


def test_prefetched_files_are_in_memory(target: MemoryProcess, tmp_path: Path) -> None:
    region = filled(target)
    saved = save(target.pid, [region], tmp_path, ["v"], CopyOptions(direct=True))
    with FilePrefetch(saved, tmp_path) as prefetch:
        assert prefetch.wait(60)
    assert files.is_in_memory(tmp_path / "v")
    load(target.pid, saved, tmp_path, target_is_zero=False)


def test_prefetch_of_a_missing_file_leaves_the_error_to_the_load(tmp_path: Path) -> None:
    missing = SavedRegion("v", 0, MIB, MIB, "")
    with FilePrefetch([missing], tmp_path) as prefetch:
        assert prefetch.wait(60)


def test_prefetch_ends_with_its_context(target: MemoryProcess, tmp_path: Path) -> None:
    saved = save(target.pid, [filled(target, size=64 * MIB)], tmp_path, ["v"])
    with FilePrefetch(saved, tmp_path, CopyOptions(threads=1, piece_bytes=BLOCK_BYTES)):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vram")]


# -- Digests, buffers, the interpreter lock ---------------------------------------------------------------------------


@given(st.binary(max_size=5000), st.integers(0, 4999), st.integers(1, 255))
def test_digest_changes_with_any_byte(data: bytes, position: int, difference: int) -> None:
    changed = bytearray(data)
    if data:
        changed[position % len(data)] ^= difference
    else:
        changed.append(difference)
    for kind in digest.LEAF_BYTES:
        assert tree_of(data, kind=kind) != tree_of(bytes(changed), kind=kind)
        assert tree_of(data, kind=kind) == tree_of(bytes(data), kind=kind)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_digest_of_zeros_tells_their_number(one: int, two: int) -> None:
    assert (tree_of(bytes(one)) == tree_of(bytes(two))) == (one == two)


def tree_of(data: bytes, piece: int = 512, kind: str = digest.KIND) -> str:
    tree = digest.Tree(len(data), piece, kind)
    for offset in reversed(range(0, len(data), piece)):
        part = data[offset : offset + piece]
        if any(part):
            tree.add(offset, memoryview(part))
        else:
            tree.add_zeros(offset, len(part))
    return tree.text()


@pytest.mark.parametrize("kind", [digest.KIND, digest.STRONG])
def test_digest_of_a_file_is_the_one_of_its_saving(target: MemoryProcess, tmp_path: Path, kind: str) -> None:
    [saved] = save(target.pid, [filled(target)], tmp_path, ["v"], CopyOptions(threads=3, piece_bytes=MIB, digest=kind))
    assert saved.digest.startswith(f"{kind}:")
    how = CopyOptions(threads=2, digest=kind)
    assert file_digests.of_file(tmp_path / "v", digest.piece_bytes_of(saved.digest), how) == saved.digest


@given(st.lists(st.integers(0, 20 * BLOCK_BYTES - 1), max_size=6), st.integers(1, 20 * BLOCK_BYTES))
def test_data_runs_are_the_blocks_with_data(positions: list[int], size: int) -> None:
    buffer = Buffer(20 * BLOCK_BYTES)
    try:
        for position in positions:
            buffer.view[position] = 1
        wanted = {position // BLOCK_BYTES for position in positions if position < size}
        runs = buffer.data_runs(size)
        assert {
            offset // BLOCK_BYTES + n for offset, length in runs for n in range(-(-length // BLOCK_BYTES))
        } == wanted
        assert all(low + length < high for (low, length), (high, _) in pairwise(runs))
        assert all(offset + length <= size for offset, length in runs)
    finally:
        buffer.close()


def test_block_of_zeros_lives_as_long_as_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask first at the same time each make one, and the cache keeps one of them."""
    made: list[weakref.ref[buffers._Zeros]] = []

    def fresh() -> buffers._Zeros:
        zeros = buffers._Zeros()
        made.append(weakref.ref(zeros))
        return zeros

    monkeypatch.setattr(buffers, "_zeros", fresh)
    monkeypatch.setattr(buffers, "_memcmp", lambda: lambda ours, zeros, length: int(made[-1]() is None))
    buffer = Buffer(4 * BLOCK_BYTES)
    assert buffer.data_runs(4 * BLOCK_BYTES) == []
    buffer.close()


def test_buffers_are_aligned_for_direct_io() -> None:
    buffer = Buffer(BLOCK_BYTES)
    assert buffer.address % 4096 == 0
    buffer.close()


TURNS = 10
OPERATIONS = ["read_into", "write_from", "pread", "pwrite", "digest", "compare"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_interpreter_goes_on_while_bytes_are_moved(target: MemoryProcess, tmp_path: Path, operation: str) -> None:
    """Each step on 256 MiB in one call, which a busy machine may be done with before another thread had its turn."""
    size = 256 * MIB
    region = target.region("a", size)
    buffer = Buffer(size)
    with files.writing(tmp_path / "v", size, direct=False) as file:
        calls = {
            "read_into": lambda: process_memory.read_into(target.pid, region.start, buffer.address, size),
            "write_from": lambda: process_memory.write_from(target.pid, region.start, buffer.address, size),
            "pread": lambda: file.read(0, buffer.view),
            "pwrite": lambda: file.write(0, buffer.view),
            "digest": lambda: digest.Tree(size, size).add(0, buffer.view),
            "compare": lambda: _compare(buffer, size),
        }
        assert any(_counts_during(calls[operation]) for _ in range(TURNS))
    buffer.close()


def _compare(buffer: Buffer, size: int) -> None:
    libc = ctypes.CDLL(None)
    libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    assert libc.memcmp(buffer.address, buffer.address + size // 2, size // 2) == 0


def _counts_during(call: Callable[[], None]) -> int:
    """Return how often another thread has counted while `call` ran.

    It sleeps between two counts, and no thread is made to give up the interpreter lock: it counts only if `call` does.
    """
    count, stop, running = [0], threading.Event(), threading.Event()

    def work() -> None:
        running.set()
        while not stop.is_set():
            count[0] += 1
            time.sleep(0.0001)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=work)
    try:
        sys.setswitchinterval(1000)  # before the thread waits for the lock: it takes the interval along
        thread.start()
        running.wait()
        before = count[0]
        call()
        return count[0] - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_count_finds_a_call_that_keeps_the_interpreter_lock() -> None:
    keeping = ctypes.PyDLL(None).usleep
    assert _counts_during(lambda: keeping(50_000)) == 0
    assert _counts_during(lambda: ctypes.CDLL(None).usleep(50_000)) > 0


def test_crew_keeps_no_buffer_and_no_thread() -> None:
    before = threading.active_count()
    todo = thread_pool.pieces([("x", 5 * MIB, MIB)])
    thread_pool.run(todo, lambda piece, buffer: len(buffer.view), CopyOptions(threads=16, piece_bytes=MIB))
    assert threading.active_count() == before


@pytest.mark.parametrize(("threads", "piece"), [(0, MIB), (1, 0), (1, 4096), (1, MIB + 4096)])
def test_impossible_transfers_are_refused(threads: int, piece: int) -> None:
    with pytest.raises(ValueError, match="not possible"):
        CopyOptions(threads=threads, piece_bytes=piece)
