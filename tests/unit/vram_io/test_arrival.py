"""The record of an image that is arriving: readers wait for what is missing, and learn why it will not come."""

from __future__ import annotations

import itertools
import os
import random as randoms
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.vram_io import digest, file_digests
from kybernate_shim.vram_io.arrival import BLOCK, Arrival, ArrivalWriter, Description, arrival_in, begin, reading
from kybernate_shim.vram_io.errors import VramError
from kybernate_shim.vram_io.image_files import ARRIVAL
from kybernate_shim.vram_io.thread_pool import CopyOptions

SIZE = 2 * BLOCK + 4096
WHAT = Description({"a": SIZE, "b": 10}, ("object s3://images", "peer node-1"))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ArrivalWriter]:
    writer = begin(tmp_path, WHAT)
    yield writer
    writer.close()


def arrival(directory: Path) -> Arrival:
    found = arrival_in(directory)
    assert found is not None
    return found


def test_reader_waits_for_its_range_alone(tmp_path: Path, writer: ArrivalWriter) -> None:
    reader = arrival(tmp_path)
    writer.wrote("a", BLOCK, BLOCK)
    writer.wrote("no VRAM", 0, 100)
    reader.wait("a", BLOCK, BLOCK)
    reader.wait("other", 0, 100)  # a file that does not arrive is there
    with pytest.raises(VramError, match="cancelled"):
        reader.wait("a", BLOCK - 1, 2, lambda: True)
    assert reader.bytes_here == BLOCK


def test_reader_is_woken_by_the_last_byte(tmp_path: Path, writer: ArrivalWriter) -> None:
    reader, done = arrival(tmp_path), threading.Event()
    writer.wrote("a", 2 * BLOCK, 4000)

    def read() -> None:
        reader.wait_whole("a")
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    writer.wrote("a", 0, 2 * BLOCK)
    assert not done.is_set()
    writer.wrote("a", 2 * BLOCK + 4000, 96)
    thread.join(20)
    assert done.is_set()


@given(st.lists(st.integers(1, SIZE - 1), unique=True, max_size=12), st.randoms())
def test_block_is_here_when_all_of_it_is(cuts: list[int], random: randoms.Random) -> None:
    bounds = [0, *sorted(cuts), SIZE]
    parts = list(itertools.pairwise(bounds))
    random.shuffle(parts)
    with tempfile.TemporaryDirectory() as place:
        writer = begin(Path(place), WHAT)
        reader, there = arrival(Path(place)), bytearray(SIZE)
        for start, end in parts:
            writer.wrote("a", start, end - start)
            there[start:end] = b"\1" * (end - start)
            for block in range(3):
                whole = 0 not in there[block * BLOCK : (block + 1) * BLOCK]
                assert _is_here(reader, block) == whole
        writer.close()


def _is_here(reader: Arrival, block: int) -> bool:
    try:
        reader.wait("a", block * BLOCK, 1, lambda: True)
    except VramError:
        return False
    return True


def test_failure_says_why(tmp_path: Path, writer: ArrivalWriter) -> None:
    reader = arrival(tmp_path)
    writer.fail("the bucket is gone: ä")
    writer.fail("later")
    with pytest.raises(VramError, match=r"a did not arrive from object s3://images: the bucket is gone: ä$"):
        reader.wait("a", 0, 1)
    with pytest.raises(VramError, match="the rest of the image did not arrive"):
        reader.wait_all()


def test_silent_writer_is_given_up(tmp_path: Path) -> None:
    writer = begin(tmp_path, replace(WHAT, patience=0.0))
    with pytest.raises(VramError, match="nothing has arrived from object s3://images for 0 s; a is missing"):
        arrival(tmp_path).wait("a", 0, 1)
    writer.close()


KILLED = """
import sys, time
from pathlib import Path
from kybernate_shim.vram_io.arrival import Description, begin
writer = begin(Path(sys.argv[1]), Description({"a": 10}, ("there",)))
print("begun", flush=True)
time.sleep(600)
"""


def test_writer_that_is_killed_is_noticed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        reader = arrival(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(VramError, match="the process that brings the image from there has ended; a is missing"):
            reader.wait("a", 0, 1)


def test_writer_that_is_done_may_end(tmp_path: Path) -> None:
    writer = begin(tmp_path, WHAT)
    reader = arrival(tmp_path)
    for name, size in WHAT.files.items():
        writer.wrote(name, 0, size)
    writer.complete()
    writer.close()
    reader.wait_all()
    reader.wait_whole("a")


@pytest.mark.parametrize("content", [b"", b"KYBARRV0" + bytes(2000), b"KYBARRV1" + b"\xff" * 2000])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ARRIVAL).write_bytes(content)
    with pytest.raises(
        VramError, match=r"did not arrive|nothing has arrived|has ended|cannot be|not a record|shorter|cancelled"
    ):
        arrival_in(tmp_path)


def test_record_is_made_once(tmp_path: Path, writer: ArrivalWriter) -> None:
    with pytest.raises(FileExistsError):
        begin(tmp_path, WHAT)


def test_digest_of_a_file_that_arrives(tmp_path: Path) -> None:
    content = os.urandom(BLOCK) + bytes(BLOCK) + os.urandom(4096)
    (tmp_path / "whole").write_bytes(content)
    expected = file_digests.of_file(tmp_path / "whole", BLOCK, CopyOptions(threads=2))
    with (tmp_path / "a").open("wb") as file:
        file.truncate(SIZE)
    writer = begin(tmp_path, WHAT)
    found: list[str] = []
    how = CopyOptions(threads=2, arrival=arrival(tmp_path))
    thread = threading.Thread(target=lambda: found.append(file_digests.of_file(tmp_path / "a", BLOCK, how)))
    thread.start()
    with (tmp_path / "a").open("r+b") as file:
        for offset in (2 * BLOCK, 0):
            file.seek(offset)
            file.write(content[offset : offset + BLOCK])
            file.flush()
            writer.wrote("a", offset, len(content[offset : offset + BLOCK]))
    writer.wrote("a", BLOCK, BLOCK)
    thread.join(20)
    assert found == [expected]
    writer.close()


@pytest.mark.parametrize("kind", [digest.KIND, digest.STRONG])
def test_digests_of_what_arrives_in_whole_blocks_are_known(tmp_path: Path, kind: str) -> None:
    content = memoryview(os.urandom(SIZE))
    (tmp_path / "a").write_bytes(content)
    expected = file_digests.of_file(tmp_path / "a", BLOCK, CopyOptions(threads=2, digest=kind))
    writer = begin(tmp_path, WHAT, {"a": kind})
    writer.wrote("a", BLOCK, SIZE - BLOCK, content[BLOCK:])
    writer.wrote("a", 0, BLOCK, content[:BLOCK])
    (tmp_path / "a").write_bytes(bytes(SIZE))  # nothing of it is read
    how = CopyOptions(threads=2, arrival=arrival(tmp_path), digest=kind)
    assert file_digests.of_file(tmp_path / "a", BLOCK, how) == expected
    assert arrival(tmp_path).bytes_here >= SIZE
    writer.close()


@pytest.mark.parametrize(
    ("cuts", "digests"),
    [([0, 4096, SIZE], {"a": digest.KIND}), ([0, SIZE], {}), ([0, SIZE], {"a": digest.STRONG})],
    ids=["in parts", "not asked for", "of another kind"],
)
def test_what_has_no_digest_yet_is_read(tmp_path: Path, cuts: list[int], digests: dict[str, str]) -> None:
    content = memoryview(os.urandom(SIZE))
    (tmp_path / "a").write_bytes(content)
    writer = begin(tmp_path, WHAT, digests)
    for start, end in itertools.pairwise(cuts):
        writer.wrote("a", start, end - start, content[start:end])
    reader = arrival(tmp_path)
    assert reader.leaf("a", 0, BLOCK, digest.KIND) is None
    expected = file_digests.of_file(tmp_path / "a", BLOCK, CopyOptions(threads=2))
    assert file_digests.of_file(tmp_path / "a", BLOCK, CopyOptions(threads=2, arrival=reader)) == expected
    writer.close()


@given(st.lists(st.integers(1, SIZE - 1), unique=True, max_size=6), st.randoms())
def test_digest_is_right_however_the_bytes_come(cuts: list[int], random: randoms.Random) -> None:
    parts = list(itertools.pairwise([0, *sorted(cuts), SIZE]))
    random.shuffle(parts)
    content = memoryview(os.urandom(SIZE))
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "a").write_bytes(content)
        writer = begin(Path(place), WHAT, {"a": digest.KIND})
        for start, end in parts:
            writer.wrote("a", start, end - start, content[start:end])
        expected = file_digests.of_file(Path(place) / "a", BLOCK, CopyOptions(threads=1))
        how = CopyOptions(threads=1, arrival=arrival(Path(place)))
        assert file_digests.of_file(Path(place) / "a", BLOCK, how) == expected
        writer.close()


def test_pieces_of_another_size_are_read(tmp_path: Path) -> None:
    content = memoryview(os.urandom(SIZE))
    (tmp_path / "a").write_bytes(content)
    expected = file_digests.of_file(tmp_path / "a", 2 * BLOCK, CopyOptions(threads=2))
    writer = begin(tmp_path, WHAT, {"a": digest.KIND})
    writer.wrote("a", 0, SIZE, content)
    how = CopyOptions(threads=2, arrival=arrival(tmp_path))
    assert file_digests.of_file(tmp_path / "a", 2 * BLOCK, how) == expected
    writer.close()


@pytest.mark.parametrize("transient", [True, False])
def test_memory_of_what_was_read_is_given_back(tmp_path: Path, transient: bool) -> None:
    directory = Path(f"/dev/shm/arrival-{os.getpid()}")
    directory.mkdir(mode=0o700)
    try:
        (directory / "a").write_bytes(os.urandom(SIZE))
        writer = begin(directory, replace(WHAT, transient=transient))
        writer.wrote("a", 0, SIZE)
        before = (directory / "a").stat().st_blocks
        with reading(directory / "a", CopyOptions(arrival=arrival(directory))) as file:
            file.read(0, memoryview(bytearray(BLOCK)))
            file.spend(0, BLOCK)
        given = (before - (directory / "a").stat().st_blocks) * 512
        assert given == (BLOCK if transient else 0)
        assert (directory / "a").stat().st_size == SIZE
        writer.close()
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
