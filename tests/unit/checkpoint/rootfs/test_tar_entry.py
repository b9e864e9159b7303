"""Headers of entries are parsed as tarfile does it, the usual ones without it."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.tar_entry import Entry
from kybernate_shim.checkpoint.tree_tar import ENCODING, _header

ERRORS = "surrogateescape"
FIELDS = ("name", "mode", "uid", "gid", "size", "mtime", "chksum", "type", "linkname", "uname", "gname", "devmajor",
          "devminor", "pax_headers")  # fmt: skip
USUAL = (tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
OTHERS = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, b"?")


def outcome(parse: Callable[[bytes, str, str], tarfile.TarInfo], block: bytes) -> object:
    try:
        info = parse(block, ENCODING, ERRORS)
    except tarfile.TarError as error:
        return type(error), str(error)
    return [getattr(info, field) for field in FIELDS]


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """The first block of a header, of which some bytes may have been changed and the checksum be made right again."""
    info = tarfile.TarInfo(draw(st.text(max_size=20)) + draw(st.sampled_from(("", "/", "//"))))
    info.type = draw(st.sampled_from(USUAL + OTHERS))
    info.mode, info.mtime = draw(st.integers(0, 0o7777)), draw(st.integers(0, 1 << 36))
    info.uid, info.gid = draw(st.integers(0, 1 << 22)), draw(st.integers(0, 1 << 22))
    info.size, info.linkname = draw(st.integers(0, 1 << 36)), draw(st.text(max_size=20))
    info.uname = draw(st.sampled_from(("", "root")))
    format = draw(st.sampled_from((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)))
    block = bytearray(info.tobuf(format, ENCODING, ERRORS)[: tarfile.BLOCKSIZE])
    for place in draw(st.lists(st.integers(0, tarfile.BLOCKSIZE - 1), max_size=3)):
        block[place] = draw(st.sampled_from(b"\0 07189_-+\x80\xff"))
    if draw(st.booleans()):
        block[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(block))[0]  # type: ignore[attr-defined]
    return bytes(block)


@given(blocks())
def test_entry_is_the_one_that_tarfile_parses(block: bytes) -> None:
    assert outcome(Entry.frombuf, block) == outcome(tarfile.TarInfo.frombuf, block)


@pytest.mark.parametrize("block", [b"", b"short", bytes(tarfile.BLOCKSIZE)])
def test_end_of_a_file_is_the_one_that_tarfile_sees(block: bytes) -> None:
    assert outcome(Entry.frombuf, block) == outcome(tarfile.TarInfo.frombuf, block)


@pytest.mark.parametrize("kind", USUAL)
def test_header_of_a_diff_needs_no_tarfile(kind: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tarfile.TarInfo("a/b")
    info.type, info.mode, info.uid, info.linkname = kind, 0o640, 1000, "elsewhere"
    info.pax_headers = {"mtime": "1.000000001"}
    header = _header(info)
    monkeypatch.delattr(tarfile, "calc_chksums")
    names = [
        Entry.frombuf(header[begin : begin + tarfile.BLOCKSIZE], ENCODING, ERRORS).name
        for begin in (0, 2 * tarfile.BLOCKSIZE)
    ]
    assert names == ["././@PaxHeader", "a/b"]


def test_usual_headers_of_a_tar_file_need_no_tarfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its functions this version of tarfile calls."""
    path = tmp_path / "t.tar"
    info = tarfile.TarInfo("a/b")
    info.pax_headers = {"mtime": "1.000000001"}
    path.write_bytes(_header(info) + bytes(2 * tarfile.BLOCKSIZE))
    monkeypatch.delattr(tarfile, "calc_chksums")
    with tarfile.open(path, "r:", encoding=ENCODING, tarinfo=Entry) as archive:
        assert [(one.name, one.pax_headers) for one in archive] == [("a/b", info.pax_headers)]
