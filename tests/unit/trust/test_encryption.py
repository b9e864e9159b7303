"""Encrypted files: what was written comes back, every change is found, holes cost nothing, memory is bounded."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kybernate_shim.trust.encryption import (
    CHUNK_BYTES,
    TAG_BYTES,
    Buffers,
    EncryptedFile,
    EncryptingFile,
    EncryptionBroken,
    FileKey,
    Layout,
    NodeKey,
    WrappedKey,
    chunk_count,
    new_data_key,
)

KEY = FileKey(bytes(range(32)), "image", "pages-1.img")
CHUNK = 16  # small, so that every bit of a file of several chunks can be tried
HEADER = 36


class Files:
    """Descriptors of files in memory, so that thousands of examples cost no disk."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def new(self, content: bytes = b"", size: int = 0) -> int:
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        self.fds.append(fd)
        os.truncate(fd, max(size, len(content)))
        os.pwrite(fd, content, 0)
        return fd

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.fds:
            os.close(fd)


def encrypt_fd(files: Files, source: int, key: FileKey = KEY, chunk: int = CHUNK, order: int = 0) -> int:
    target = files.new()
    file = EncryptingFile(source, target, key, chunk)
    file.begin()
    chunks = list(file.layout.data)
    random.Random(order).shuffle(chunks)
    for number in chunks:
        file.encrypt(number, Buffers(chunk))
    return target


def encrypted(content: bytes, key: FileKey = KEY, chunk: int = CHUNK, order: int = 0) -> bytes:
    with Files() as files:
        fd = encrypt_fd(files, files.new(content), key, chunk, order)
        return os.pread(fd, os.fstat(fd).st_size, 0)


def decrypted(stored: bytes, key: FileKey = KEY) -> bytes:
    with Files() as files:
        file = EncryptedFile(files.new(stored), key)
        return b"".join(map(bytes, file.blocks(0, file.layout.size)))


def assert_broken(stored: bytes, key: FileKey = KEY) -> None:
    with pytest.raises(EncryptionBroken, match=key.name):
        decrypted(stored, key)


@given(st.binary(max_size=5 * CHUNK), st.integers(0, 5))
def test_what_was_encrypted_comes_back(content: bytes, order: int) -> None:
    assert decrypted(encrypted(content, order=order)) == content


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_sizes_around_a_chunk(size: int) -> None:
    content = random.Random(size).randbytes(size)
    stored = encrypted(content, chunk=CHUNK_BYTES)
    assert decrypted(stored) == content
    assert len(stored) == Layout(size, CHUNK_BYTES, range(chunk_count(size, CHUNK_BYTES))).stored


@given(st.binary(min_size=1, max_size=5 * CHUNK), st.data())
def test_any_part_can_be_read(content: bytes, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    with Files() as files:
        file = EncryptedFile(encrypt_fd(files, files.new(content)), KEY)
        assert b"".join(map(bytes, file.blocks(start, end))) == content[start:end]


@pytest.mark.parametrize("size", [0, 1, CHUNK, 2 * CHUNK + 5])
def test_every_flipped_bit_is_found(size: int) -> None:
    stored = encrypted(bytes(range(1, size + 1)))
    for bit in range(8 * len(stored)):
        changed = bytearray(stored)
        changed[bit // 8] ^= 1 << bit % 8
        assert_broken(bytes(changed))


@pytest.mark.parametrize("size", [0, CHUNK, 3 * CHUNK + 5])
def test_every_truncation_and_every_longer_file_is_found(size: int) -> None:
    stored = encrypted(bytes(range(1, size + 1)))
    for length in range(len(stored)):
        assert_broken(stored[:length])
    for more in (b"\0", stored[-1:], stored):
        assert_broken(stored + more)


def chunks_of(stored: bytes, count: int) -> tuple[bytes, list[bytes]]:
    body = HEADER + -(-count // 8) + TAG_BYTES
    return stored[:body], [stored[at : at + CHUNK + TAG_BYTES] for at in range(body, len(stored), CHUNK + TAG_BYTES)]


@given(st.permutations(range(4)))
def test_every_other_order_of_chunks_is_found(order: list[int]) -> None:
    content = bytes(range(4 * CHUNK))
    head, chunks = chunks_of(encrypted(content), 4)
    changed = head + b"".join(chunks[index] for index in order)
    if order == [0, 1, 2, 3]:
        assert decrypted(changed) == content
    else:
        assert_broken(changed)


def test_a_chunk_or_a_header_of_another_writing_of_the_file_is_found() -> None:
    content = bytes(range(4 * CHUNK))
    (head, chunks), (other_head, others) = (chunks_of(encrypted(content), 4) for _ in range(2))
    assert_broken(other_head + b"".join(chunks))
    for index in range(4):
        assert_broken(head + b"".join([*chunks[:index], others[index], *chunks[index + 1 :]]))


@pytest.mark.parametrize(
    "other",
    [
        FileKey(KEY.data_key, "image", "pages-2.img"),
        FileKey(KEY.data_key, "imag", "epages-1.img"),
        FileKey(KEY.data_key, "image2", "pages-1.img"),
        FileKey(bytes(32), "image", "pages-1.img"),
    ],
    ids=["name", "border of the names", "image", "key"],
)
def test_a_file_in_the_place_of_another_is_found(other: FileKey) -> None:
    assert_broken(encrypted(b"x" * 50), other)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(content: bytes) -> None:
    assert_broken(content)
    assert_broken(encrypted(b"")[:8] + content)


@pytest.mark.parametrize(
    ("offset", "field"),
    [(8, b"\0\0\0\0"), (8, b"\xff\xff\xff\xff"), (12, b"\xff" * 8), (12, b"\x7f" + b"\xff" * 7)],
)
def test_impossible_sizes_take_no_memory(offset: int, field: bytes) -> None:
    stored = bytearray(encrypted(b"x" * 50))
    stored[offset : offset + len(field)] = field
    tracemalloc.start()
    try:
        assert_broken(bytes(stored))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_same_content_is_never_encrypted_alike() -> None:
    one, other = encrypted(b"secret" * 10), encrypted(b"secret" * 10)
    assert one[HEADER:] != other[HEADER:]
    assert b"secret" not in one


PAGE = 4096


@settings(max_examples=30)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 3), st.integers(0, PAGE - 1))
def test_holes_take_no_room_and_stay_holes(pages: list[bool], chunk_pages: int, more: int) -> None:
    chunk, size = chunk_pages * PAGE, len(pages) * PAGE + more
    with Files() as files:
        source = files.new(size=size)
        for index, has_data in enumerate(pages):
            if has_data:
                os.pwrite(source, b"d" * PAGE, index * PAGE)
        stored = encrypt_fd(files, source, chunk=chunk)
        file = EncryptedFile(stored, KEY)
        assert b"".join(map(bytes, file.blocks(0, size))) == os.pread(source, size, 0)
        full = {index // chunk_pages for index, has_data in enumerate(pages) if has_data}
        assert list(file.layout.data) == sorted(full)
        assert os.fstat(stored).st_size <= HEADER + 2 + TAG_BYTES + len(full) * (chunk + TAG_BYTES)


def test_a_hole_cannot_take_the_place_of_data() -> None:
    with Files() as files:
        fd = encrypt_fd(files, files.new(size=2 * PAGE), chunk=PAGE)
        holes = os.pread(fd, os.fstat(fd).st_size, 0)
    assert decrypted(holes) == bytes(2 * PAGE)
    full = encrypted(b"d" * 2 * PAGE, chunk=PAGE)
    map_end = HEADER + 1 + TAG_BYTES
    assert_broken(full[:HEADER] + holes[HEADER:map_end])
    assert_broken(holes[:map_end] + full[map_end:])


def test_a_large_sparse_file_is_small_and_takes_little_memory() -> None:
    size = 1 << 36
    with Files() as files:
        source = files.new(size=size)
        os.pwrite(source, b"end", size - 3)
        tracemalloc.start()
        try:
            stored = encrypt_fd(files, source, chunk=CHUNK_BYTES)
            file = EncryptedFile(stored, KEY)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert b"".join(map(bytes, file.blocks(size - 5, size))) == b"\0\0end"
        assert os.fstat(stored).st_size < 2 * CHUNK_BYTES
        assert peak < 8 * CHUNK_BYTES


def test_memory_does_not_grow_with_the_file() -> None:
    with Files() as files:
        source = files.new(size=64 * CHUNK_BYTES)
        for chunk in range(64):
            os.pwrite(source, b"d", chunk * CHUNK_BYTES)
        target = files.new()
        tracemalloc.start()
        try:
            file, buffers = EncryptingFile(source, target, KEY), Buffers(CHUNK_BYTES)
            file.begin()
            for chunk in file.layout.data:
                file.encrypt(chunk, buffers)
            assert sum(map(len, EncryptedFile(target, KEY).blocks(0, 64 * CHUNK_BYTES))) == 64 * CHUNK_BYTES
            assert tracemalloc.get_traced_memory()[1] < 6 * CHUNK_BYTES
        finally:
            tracemalloc.stop()


def test_a_file_that_shrinks_while_it_is_encrypted_is_an_error() -> None:
    with Files() as files:
        source = files.new(b"d" * 3 * CHUNK)
        file = EncryptingFile(source, files.new(), KEY, CHUNK)
        os.truncate(source, CHUNK)
        with pytest.raises(OSError, match="became shorter"):
            file.encrypt(2, Buffers(CHUNK))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["fifo", "directory"])
def test_only_a_plain_file_is_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    fd = os.open(tmp_path / "x", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(EncryptionBroken, match="not a plain file"):
            EncryptedFile(fd, KEY)
    finally:
        os.close(fd)


# -- Data keys --------------------------------------------------------------------------------------------------------


def test_a_data_key_is_opened_by_the_key_that_wrapped_it() -> None:
    key, data_key = NodeKey(os.urandom(32)), new_data_key()
    assert key.unwrap(key.wrap(data_key, "image"), "image") == data_key
    assert data_key.hex() not in key.wrap(data_key, "image").wrapped


def test_a_data_key_that_was_changed_or_moved_to_another_image_is_refused() -> None:
    key = NodeKey(bytes(32))
    wrapped = key.wrap(new_data_key(), "image")
    sealed = bytes.fromhex(wrapped.wrapped)
    with pytest.raises(EncryptionBroken):
        key.unwrap(wrapped, "other image")
    with pytest.raises(EncryptionBroken):
        NodeKey(bytes(31) + b"1").unwrap(wrapped, "image")
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EncryptionBroken):
            key.unwrap(WrappedKey(wrapped.key_id, changed.hex()), "image")


@given(st.text(max_size=200))
def test_any_text_for_a_wrapped_key_is_refused(text: str) -> None:
    with pytest.raises(EncryptionBroken):
        NodeKey(bytes(32)).unwrap(WrappedKey("", text), "image")


def test_key_ids_tell_keys_apart_and_tell_nothing_of_them() -> None:
    one, other = NodeKey(bytes(32)), NodeKey(bytes(31) + b"1")
    assert one.id != other.id
    assert len(one.id) == 16
    assert "\\x00" not in repr(one)
    assert "data_key" not in repr(KEY)


def test_last_chunk_count() -> None:
    assert [chunk_count(size, 4) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]
