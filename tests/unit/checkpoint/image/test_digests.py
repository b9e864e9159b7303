"""Digests of files: the same however they are computed, also while a file grows."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from kybernate_shim.checkpoint.image import digest_form, digests, verification
from kybernate_shim.checkpoint.image.digests import Digester, FileUnreadable, algorithm_of
from kybernate_shim.checkpoint.image.manifest import File
from kybernate_shim.errors import Stopped


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE", 1000)
    monkeypatch.setattr(digests, "BUFFER", 300)


def expected(data: bytes) -> str:
    if len(data) <= 1000:
        return f"xxh128:{xxh3_128_hexdigest(data)}"
    pieces = [xxh3_128_digest(data[start : start + 1000]) for start in range(0, len(data), 1000)]
    return f"xxh128-tree:{xxh3_128_hexdigest(b''.join(pieces))}"


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 12345])
def test_digest_is_of_the_content_or_of_the_pieces(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    with Digester() as digester:
        assert digester.digest(tmp_path / "f") == expected(data)


@pytest.mark.parametrize("algorithm", ["xxh128", "blake3"])
def test_long_file_is_no_file_of_vram(tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest, `blake3-tree:<hex>`, has the algorithm's name of VRAM's, `blake3-tree:<piece>:<hex>`."""
    monkeypatch.setattr(digest_form, "PIECE", 1000)
    data = os.urandom(5000)
    (tmp_path / "f").write_bytes(data)
    with Digester(algorithm) as digester:
        digest = digester.digest(tmp_path / "f")
    assert digest.startswith(f"{algorithm}-tree:")
    assert digest_form.form_of(digest) == digest_form.DigestForm(algorithm)
    assert digest_form.strong_form_of(digest) == digest_form.DigestForm("blake3")
    assert problems_of_file(tmp_path, File("f", len(data), digest)) == []
    assert problems_of_file(tmp_path, File("f", len(data), digest[:-1] + ("0" if digest[-1] != "0" else "1"))) == [
        "changed"
    ]


def problems_of_file(directory: Path, file: File) -> list[str]:
    return [problem.kind for problem in verification._digest_problems(directory, [file], lambda done, total: None)]


def test_stopped_digester_reads_no_further(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(5000))
    done: list[int] = []

    def stop_after_some(count: int) -> None:
        done.append(count)
        digester.stop()

    with Digester(progress=stop_after_some) as digester, pytest.raises(Stopped, match="not digested to its end"):
        digester.digest(tmp_path / "f")
    assert 0 < sum(done) < 5000


def test_entries_come_in_the_order_of_the_names(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name * 5)
    done: list[int] = []
    with Digester(progress=done.append) as digester:
        entries = digester.files(tmp_path, ["c", "a", "b"])
    assert [(entry.name, entry.size) for entry in entries] == [("c", 5), ("a", 5), ("b", 5)]
    assert sum(done) == 15


@settings(deadline=None)  # the first example imports and starts threads
@given(st.lists(st.binary(min_size=1, max_size=700), min_size=1, max_size=8))
def test_a_growing_file_has_the_same_digest(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("growing") / "pages-1.img"
    with Digester() as digester:
        for part in parts:
            with path.open("ab") as stream:
                stream.write(part)
            digester._keep_up(path)
        assert digester.digest(path) == expected(b"".join(parts))


def test_following_digests_pieces_before_the_file_is_finished(tmp_path: Path) -> None:
    data = os.urandom(3500)
    seen = threading.Event()
    with Digester(progress=lambda _: seen.set()) as digester, digester.following(tmp_path / "images"):
        (tmp_path / "images").mkdir()
        with (tmp_path / "images/pages-1.img").open("wb", buffering=0) as stream:
            stream.write(data[:2500])
            assert seen.wait(10), "no piece was digested while the file was open"
            stream.write(data[2500:])
        assert digester.digest(tmp_path / "images/pages-1.img") == expected(data)


def test_who_keeps_up_with_a_file_needs_no_other_thread(tmp_path: Path) -> None:
    path, data, threads = tmp_path / "pages-1.img", os.urandom(7000), set[int]()
    with Digester(progress=lambda _: threads.add(threading.get_ident())) as digester:
        for start in range(0, len(data), 700):
            with path.open("ab") as stream:
                stream.write(data[start : start + 700])
            digester._keep_up(path)
        assert digester.digest(path) == expected(data)
    assert threads == {threading.get_ident()}


def follow(directory: Path, data: bytes) -> tuple[list[int], list[int], str]:
    """Digest `data` in two halves, and return how nice the threads were while they followed and afterwards."""
    path = directory / "pages-1.img"
    middle, nice, seen = len(data) // 2, list[int](), threading.Event()

    def progress(_: int) -> None:
        nice.append(os.getpriority(os.PRIO_PROCESS, 0))
        seen.set()

    with Digester(progress=progress) as digester:
        with digester.following(directory):
            path.write_bytes(data[:middle])
            assert seen.wait(10), "nothing was digested while the file was open"
        followed = len(nice)
        with path.open("ab") as stream:
            stream.write(data[middle:])
        digest = digester.digest(path)
    return nice[:followed], nice[followed:], digest


def test_threads_are_nice_only_while_they_follow(tmp_path: Path) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    while_following, afterwards, _ = follow(tmp_path, os.urandom(500))
    assert set(while_following) == {digests.NICEST}
    assert set(afterwards) == {usual}
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


def test_threads_that_may_not_change_their_priority_digest_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "setpriority", refuse)
    data = os.urandom(2500)
    assert follow(tmp_path, data)[2] == expected(data)


def test_a_file_that_was_replaced_is_digested_anew(tmp_path: Path) -> None:
    path = tmp_path / "pages-1.img"
    path.write_bytes(b"a" * 2500)
    with Digester() as digester:
        digester._advance(path, complete=False)
        (tmp_path / "new").write_bytes(b"b" * 2500)
        (tmp_path / "new").replace(path)
        assert digester.digest(path) == expected(b"b" * 2500)


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pages-1.img"
    path.write_bytes(b"a" * 2500)
    with Digester() as digester:
        digester._advance(path, complete=False)
        os.truncate(path, 10)
        with pytest.raises(FileUnreadable, match="shorter"):
            digester.digest(path)


def test_other_algorithms_are_named_in_the_digest(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    with Digester("crc32") as digester:
        assert digester.digest(tmp_path / "f") == f"crc32:{zlib.crc32(b'abc'):08x}"
    with Digester("sha256") as digester:
        assert digester.digest(tmp_path / "f") == f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    with Digester("blake2b") as digester:
        assert digester.digest(tmp_path / "f") == f"blake2b:{hashlib.blake2b(b'abc', digest_size=32).hexdigest()}"
    assert algorithm_of("crc32-tree:00") == "crc32"


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(FileUnreadable, match="md4"):
        Digester("md4")
    with pytest.raises(FileUnreadable, match="md4"):
        algorithm_of("md4:00")
