"""A diff of anybody's making: it takes bounded memory and time, and grants nothing that the container cannot make."""

from __future__ import annotations

import io
import os
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kybernate_shim.checkpoint import tree_tar
from kybernate_shim.checkpoint.rootfs import apply, diff
from kybernate_shim.checkpoint.rootfs.apply import Powers, apply_diff
from kybernate_shim.checkpoint.rootfs.overlay import Overlay
from kybernate_shim.errors import Damaged, Stopped
from kybernate_shim.oci.spec import Spec

BLOCK = tarfile.BLOCKSIZE
MEMORY = 64 << 20
UNPRIVILEGED = Powers(devices=False, trusted_attributes=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return tmp_path / "diff.tar"


def entry(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **pax: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.pax_headers = kind, len(content), pax
    info.uid, info.gid = os.getuid(), os.getgid()
    return info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % BLOCK)


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    """Return the header of an entry that announces so many bytes."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def refusal(tar: Path, root: Path, content: bytes, *, size: int | None = None) -> str:
    tar.write_bytes(content)
    if size is not None:
        os.truncate(tar, size)
    with pytest.raises(Damaged, match="tar: ") as refused:
        apply_diff(tar, root, powers=UNPRIVILEGED)
    return str(refused.value)


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"X"]
)
def test_header_of_gigabytes_is_not_read(tar: Path, root: Path, kind: bytes) -> None:
    """A file with holes announces them for nothing."""
    tracemalloc.start()
    try:
        assert "bytes of names, attributes and holes" in refusal(tar, root, header(kind, 4 << 30), size=5 << 30)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def test_map_of_holes_without_end_is_not_read(tar: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MOST_HEADER", 64 << 10)
    count = 10_000_000
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "f", "GNU.sparse.realsize": "1"}
    content = f"{count}\n".encode() + b"1\n" * (1 << 20)
    assert "names, attributes and holes" in refusal(tar, root, entry("f", content=content, **sparse))


@pytest.mark.parametrize("extents", [[(5, 2), (0, 2)], [(0, 4), (3, 2)], [(0, -1)], [(-4, 2)], [(0, 1 << 40)]])
def test_map_of_holes_in_disorder_is_refused(tar: Path, root: Path, extents: list[tuple[int, int]]) -> None:
    numbers = [len(extents), *(number for extent in extents for number in extent)]
    index = "".join(f"{number}\n" for number in numbers).encode().ljust(BLOCK, b"\0")
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "f", "GNU.sparse.realsize": "10"}
    assert "out of place" in refusal(tar, root, entry("f", content=index + b"xxxx", **sparse))


def test_header_for_all_entries_is_refused(tar: Path, root: Path) -> None:
    record = b"11 a=aaaaa\n"
    content = header(tarfile.XGLTYPE, len(record)) + record.ljust(BLOCK, b"\0") + entry("f")
    assert "a header for all entries" in refusal(tar, root, content)


def test_records_without_number_are_refused_before_they_are_read(tar: Path, root: Path) -> None:
    records = b"6 a=b\n" * 500_000
    content = header(tarfile.XHDTYPE, len(records)) + records + bytes(-len(records) % BLOCK) + entry("f")
    assert "more than a record in 32 bytes" in refusal(tar, root, content * 2)


def test_attributes_of_many_files_are_not_too_many_records(tar: Path, root: Path) -> None:
    many = {f"SCHILY.xattr.user.{number}": "" for number in range(100)}
    tar.write_bytes(b"".join(entry(f"f{number}", **many) for number in range(1500)))
    assert apply_diff(tar, root, powers=UNPRIVILEGED).entries == 1500


def test_chain_of_headers_is_refused(tar: Path, root: Path) -> None:
    record = b"11 a=aaaaa\n"
    content = (header(tarfile.XHDTYPE, len(record)) + record.ljust(BLOCK, b"\0")) * 2000 + entry("f")
    assert refusal(tar, root, content)


def test_entries_without_end_are_refused(tar: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MOST_ENTRIES", 10)
    assert "more than 10 entries" in refusal(tar, root, entry("f") * 11)


def test_directories_without_end_are_refused(tar: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MOST_NAME_BYTES", 100)
    names = [f"{number:030}" for number in range(4)]
    content = b"".join(entry(name, tarfile.DIRTYPE) for name in names)
    assert "more than 100 bytes of names" in refusal(tar, root, content)


@pytest.mark.parametrize("link", [False, True])
def test_name_without_end_is_refused(tar: Path, root: Path, link: bool) -> None:
    long = "x/" * 3000
    content = entry("f", tarfile.SYMTYPE, linkpath=long) if link else entry("f", path=long)
    assert "a name of more than 4096 characters" in refusal(tar, root, content)


@pytest.mark.parametrize(
    "pax", [{"uid": "1" * 30}, {"mtime": "9" * 40}, {"mtime": "nan"}, {"mtime": "inf"}, {"size": "-1"}, {"gid": "x"}]
)
def test_number_that_fits_nowhere_is_refused_or_ignored(tar: Path, root: Path, pax: dict[str, str]) -> None:
    tar.write_bytes(entry("f", **pax) + bytes(2 * BLOCK))
    try:
        apply_diff(tar, root)
    except Damaged:
        pass


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE])
def test_device_node_needs_the_capability_to_make_one(tar: Path, root: Path, kind: bytes) -> None:
    assert "no CAP_MKNOD" in refusal(tar, root, entry("disk", kind))
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("name", ["trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.x"])
def test_attribute_of_the_overlay_needs_the_capability_to_set_one(tar: Path, root: Path, name: str) -> None:
    assert "no CAP_SYS_ADMIN" in refusal(tar, root, entry("d", tarfile.DIRTYPE, **{f"SCHILY.xattr.{name}": "y"}))


@pytest.mark.parametrize("name", ["system.nfs4_acl", "os.evil", "x"])
def test_attribute_that_does_not_travel_is_refused(tar: Path, root: Path, name: str) -> None:
    assert "cannot be part of a diff" in refusal(tar, root, entry("f", **{f"SCHILY.xattr.{name}": "y"}))


@pytest.mark.parametrize("name", ["security.selinux", "security.ima", "security.apparmor"])
def test_label_of_a_security_module_is_left_to_the_node(tar: Path, root: Path, name: str) -> None:
    tar.write_bytes(entry("f", **{f"SCHILY.xattr.{name}": "y"}) + bytes(2 * BLOCK))
    apply_diff(tar, root, powers=UNPRIVILEGED)
    assert name not in os.listxattr(root / "f")


@pytest.mark.parametrize(("bounding", "powers"), [([], UNPRIVILEGED), (["CAP_MKNOD", "CAP_SYS_ADMIN"], Powers())])
def test_powers_are_those_of_the_bounding_set(bounding: list[str], powers: Powers) -> None:
    assert Powers.of(Spec({"process": {"capabilities": {"bounding": bounding}}})) == powers
    assert Powers.of(Spec({})) == UNPRIVILEGED


def test_fifo_in_the_place_of_the_diff_is_refused(tar: Path, root: Path) -> None:
    os.mkfifo(tar)
    with pytest.raises(Damaged, match="not a regular file"):
        apply_diff(tar, root)


def test_diff_of_another_size_is_refused(tar: Path, root: Path) -> None:
    tar.write_bytes(entry("f") + bytes(2 * BLOCK))
    with pytest.raises(Damaged, match="1536 bytes found, 1535 expected"):
        apply_diff(tar, root, size=1535)
    apply_diff(tar, root, size=1536)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_work_ends_when_it_is_stopped(tar: Path, root: Path, after: int) -> None:
    tar.write_bytes(entry("a") + entry("large", content=bytes(4 << 20)) + entry("b") + bytes(2 * BLOCK))
    looks = iter(range(100))
    with pytest.raises(Stopped):
        apply_diff(tar, root, stopped=lambda: next(looks) >= after)
    assert not (root / "b").exists()


def test_file_with_too_many_holes_is_written_without_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its own image would be refused."""
    monkeypatch.setattr(tree_tar, "MOST_EXTENTS", 3)
    upper, back = tmp_path / "upper", tmp_path / "back"
    upper.mkdir()
    back.mkdir()
    with (upper / "holes").open("wb") as stream:
        for number in range(6):
            stream.seek(number << 20)
            stream.write(b"data")
    diff.write_diff(Overlay(upper), tmp_path / "diff.tar")
    apply_diff(tmp_path / "diff.tar", back)
    assert (back / "holes").read_bytes() == (upper / "holes").read_bytes()


def archive(build: Callable[[tarfile.TarFile], None], kind: int) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as tar:
        build(tar)
    return stream.getvalue()


def all_kinds(tar: tarfile.TarFile) -> None:
    for number, kind in enumerate((tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)):
        info = tarfile.TarInfo(f"{'n' * 120}{number}")
        info.type, info.linkname = kind, "file"
        tar.addfile(info)
    info = tarfile.TarInfo("file")
    info.size = 600
    tar.addfile(info, io.BytesIO(b"x" * 600))


VALID = [archive(all_kinds, kind) for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(VALID), st.data())
def test_any_change_of_bytes_is_applied_inside_or_refused(tmp_path: Path, valid: bytes, data: st.DataObject) -> None:
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.binary(min_size=1, max_size=12))
        content[place : place + len(new)] = new
        block = place - place % BLOCK
        if data.draw(st.booleans()):  # make the checksum right again, so that the change is seen
            head = bytearray(content[block : block + BLOCK].ljust(BLOCK, b"\0"))
            head[148:156] = b" " * 8
            content[block + 148 : block + 156] = f"{sum(head):06o}\0 ".encode()
    base = tmp_path / "one"
    (base / "root").mkdir(parents=True)
    (base / "t.tar").write_bytes(content)
    try:
        apply_diff(base / "t.tar", base / "root", powers=UNPRIVILEGED)
    except Damaged:
        pass
    assert sorted(path.name for path in base.iterdir()) == ["root", "t.tar"]
    base.rename(tmp_path / os.urandom(8).hex())
