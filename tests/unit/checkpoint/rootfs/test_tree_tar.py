"""Files that others change while they become entries of a tar file."""

from __future__ import annotations

import os
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.tree_tar import ENCODING, XATTR, _header, data_of, decimal_seconds
from kybernate_shim.linux.beneath import closing, open_top, walk

MIB = 1 << 20


def test_stretches_of_data_are_within_the_size_that_the_file_had(tmp_path: Path) -> None:
    """It was made sparse, and longer, since it was looked at."""
    with (tmp_path / "file").open("wb") as file:
        os.pwrite(file.fileno(), b"x", 0)
        os.pwrite(file.fileno(), b"x", 8 * MIB)
        whole = list(data_of(file.fileno(), 8 * MIB + 1))
        assert whole[-1] == (8 * MIB + 1, 0)
        for size in (MIB, 4 * MIB):
            found = list(data_of(file.fileno(), size))
            assert found[-1] == (size, 0)
            assert all(offset + length <= size and length >= 0 for offset, length in found)


def test_file_that_ends_between_data_and_hole_has_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.lseek

    def lseek(fd: int, offset: int, how: int) -> int:
        found = real(fd, offset, how)
        if how == os.SEEK_DATA:
            os.ftruncate(fd, 0)
        return found

    with (tmp_path / "file").open("wb") as file:
        os.pwrite(file.fileno(), bytes(MIB), MIB)
        monkeypatch.setattr(os, "lseek", lseek)
        assert list(data_of(file.fileno(), 2 * MIB)) == [(2 * MIB, 0)]


def test_attribute_that_is_removed_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    os.setxattr(tmp_path / "file", "user.stays", b"1")
    real = os.listxattr
    monkeypatch.setattr(os, "listxattr", lambda place: ["user.gone", *real(place)])
    with closing(open_top(tmp_path)) as top:
        (found,) = [one.attributes() for one in walk(top) if one.name == "file"]
    assert found["user.stays"] == b"1"
    assert "user.gone" not in found


KINDS = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
NAMES = st.one_of(
    st.text("ab/._- ", min_size=1, max_size=101),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40),
    st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name).map(os.fsdecode),
)
NUMBERS = st.sampled_from([0, 1, 1000, 65534, 0o7777777, 0o10000000, 0xFFFFFFFE])


@given(
    st.sampled_from(KINDS), NAMES, NAMES, NUMBERS, NUMBERS, st.integers(0, 0o7777),
    st.sampled_from([0, 1, 511, 0o77777777777, 0o100000000000, 1 << 62]),
    st.sampled_from([-(1 << 62), -1, 0, 1, 1_700_000_000_123_456_789, (1 << 63) - 1]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_headers_say_what_tarfiles_own_say(
    kind: bytes, name: str, link: str, user: int, group: int, mode: int, size: int, time: int, attribute: bool,
    mark: bool,
) -> None:  # fmt: skip
    info = tarfile.TarInfo(name.rstrip("/") or ".")
    info.type, info.uid, info.gid, info.mode = kind, user, group, mode
    info.linkname = link if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    info.size = size if kind == tarfile.REGTYPE else 0
    if not mark:
        info.pax_headers = {"mtime": decimal_seconds(time)}
    if attribute:
        info.pax_headers[f"{XATTR}user.a"] = "value"
    ours, reference = _header(info), info.tobuf(tarfile.PAX_FORMAT, ENCODING, "surrogateescape")
    assert len(ours) == len(reference)
    assert told(ours) == told(reference)


def told(header: bytes) -> tuple[dict[str, object], dict[str, str]]:
    with tarfile.open(fileobj=BytesIO(header), encoding=ENCODING) as archive:
        found = archive.next()
        assert found is not None
        return dict(found.get_info()), dict(found.pax_headers)
