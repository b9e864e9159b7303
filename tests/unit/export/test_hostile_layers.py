"""Layers and layouts that another hand has made: nothing of them leaves the directory, or grows beyond the manifest."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kybernate.export import archives
from kybernate.export import unpack as unpacking
from kybernate.export.documents import LAYER, ArtefactInvalid, Descriptor, descriptor_of
from kybernate.export.layers import Compression
from kybernate.export.oci_layout import write_layout
from kybernate.export.pull import fetching
from kybernate.export.sources import exported
from kybernate.export.tar_stream import MOST_EXTENDED_BYTES
from kybernate.export.unpack import Unpacking
from kybernate.node.failure import Failure
from kybernate_shim.checkpoint.image.manifest import NAME, File, encode
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config
from kybernate_shim.errors import NoRoom
from tests.unit.export.conftest import content


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def described(image: Image) -> tuple[tarfile.TarInfo, bytes]:
    return member(f"checkpoint/{NAME}", image.content)


def whole(image: Image) -> list[tuple[tarfile.TarInfo, bytes]]:
    files = content(image.path)
    return [described(image), *(member(f"checkpoint/{name}", data) for name, data in files.items() if name != NAME)]


def unpack(directory: Path, *layers: bytes, kind: str = "") -> Unpacking:
    directory.mkdir()
    it = Unpacking(directory)
    for layer in layers:
        it.layer(iter((layer,)), replace(descriptor_of(layer, LAYER), media_type=f"{LAYER}{kind}"))
    it.finish()
    return it


def extended(content: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


@pytest.mark.parametrize(
    "headers",
    [
        extended(b"6 a=b\n" * 10_000),
        extended(b"9 a=bbbb\n", tarfile.XGLTYPE) * (2 * MOST_EXTENDED_BYTES // 1024),
        extended(bytes(1 << 20), tarfile.GNUTYPE_LONGNAME),
        extended(bytes(1 << 20)),
    ],
    ids=["records", "global headers", "long name", "length"],
)
def test_headers_of_any_number_and_length_are_refused(image: Image, tmp_path: Path, headers: bytes) -> None:
    layer = archive(described(image))
    with pytest.raises(ArtefactInvalid):
        unpack(tmp_path / "layer", headers + layer)
    (whole := tmp_path / "archive").write_bytes(headers + layer)
    with pytest.raises(Failure, match=r"has no|cannot be read|cannot be unpacked|at most"):
        archives.unpack(whole, tmp_path / "unpacked")
    with pytest.raises(Failure, match=r"has no|cannot be read|cannot be unpacked|at most"):
        archives.manifest_in(whole)


def test_archives_of_other_programs_are_unpacked(image: Image, tmp_path: Path) -> None:
    layer = archive(member("./"), member("checkpoint", type=tarfile.DIRTYPE), member("spec.dump", b"{}"), *whole(image))
    unpack(tmp_path / "to", layer)
    assert content(tmp_path / "to") == content(image.path)


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
ODD = {
    "symbolic link": member("checkpoint/core-1.img", **LINK),
    "link": member("checkpoint/core-1.img", type=tarfile.LNKTYPE, linkname="/etc/shadow"),
    "device": member("checkpoint/core-1.img", type=tarfile.CHRTYPE),
    "pipe": member("checkpoint/core-1.img", type=tarfile.FIFOTYPE),
    "link above": member("spec.dump", **LINK),
    "directory of a file's name": member("checkpoint/core-1.img", type=tarfile.DIRTYPE),
    "parent": member("checkpoint/../../escaped", b"x"),
    "absolute": member("/checkpoint/core-1.img", b"x"),
    "inner directory": member("checkpoint/a/core-1.img", b"registers"),
    "file that is not listed": member("checkpoint/more.img", b"x"),
    "log": member("checkpoint/dump.log", b"x"),
    "other size": member("checkpoint/core-1.img", b"registers and more"),
    "second manifest": member(f"checkpoint/{NAME}", b"{}"),
    "registry's notes": member("checkpoint/kybernate-registry.json", b"{}"),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_member_is_refused(image: Image, tmp_path: Path, odd: str) -> None:
    others = [one for one in whole(image) if one[0].name != "checkpoint/core-1.img"]
    if odd == "absolute":  # a name that leads nowhere is no file of the image, and the image's own is missing
        with pytest.raises(ArtefactInvalid, match="are missing"):
            unpack(tmp_path / "to", archive(*others, ODD[odd]))
    else:
        with pytest.raises(ArtefactInvalid):
            unpack(tmp_path / "to", archive(*others, ODD[odd]))
    assert {path.name for path in tmp_path.iterdir()} <= {"to", "images", "keys"}
    assert not (tmp_path / "to" / NAME).exists()


def test_file_before_the_manifest_twice_or_missing_is_refused(image: Image, tmp_path: Path) -> None:
    members = whole(image)
    for number, odd in enumerate(([*members[1:], members[0]], [*members, members[1]], members[:-1], [])):
        with pytest.raises(ArtefactInvalid):
            unpack(tmp_path / str(number), archive(*odd))


def test_huge_headers_are_refused_before_they_are_read(image: Image, tmp_path: Path) -> None:
    for number, kind in enumerate((tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE)):
        info = tarfile.TarInfo("x")
        info.type, info.size = kind, 1 << 40
        with pytest.raises(ArtefactInvalid):
            unpack(tmp_path / str(number), info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def test_impossible_sizes_are_refused(image: Image, tmp_path: Path, config: Config) -> None:
    for number, size in enumerate((1 << 62, 1 << 64, 10**18)):
        info = tarfile.TarInfo("checkpoint/core-1.img")
        info.size = size
        archive = tmp_path / f"{number}.tar"
        archive.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
        with pytest.raises(ArtefactInvalid):
            fetched(archive, config)


@pytest.mark.parametrize("kind", ["+gzip", "+zstd"])
def test_bomb_ends_where_the_manifest_does(
    image: Image, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "SLACK", 1 << 20)
    monkeypatch.setattr(unpacking, "MOST_BYTES", 1 << 20)
    bomb = archive(*whole(image)) + bytes(16 << 20)
    packed = gzip.compress(bomb, 1) if kind == "+gzip" else zstandard.compress(bomb)
    assert len(packed) < 1 << 18
    with pytest.raises(ArtefactInvalid, match="more than its manifest lists"):
        unpack(tmp_path / "to", packed, kind=kind)


def test_manifest_that_lists_more_than_fits_is_refused_before_a_file_is_written(image: Image, tmp_path: Path) -> None:
    huge = replace(
        image.manifest, files=(*image.manifest.files, File("huge.img", 1 << 60, image.manifest.files[0].digest))
    )
    with pytest.raises(NoRoom, match="make room"):
        unpack(tmp_path / "to", archive(member(f"checkpoint/{NAME}", encode(huge)), *whole(image)[1:]))
    assert list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize("kind", ["+gzip", "+zstd", "+lzma", ""])
def test_layer_that_is_not_what_its_type_says_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ArtefactInvalid):
        unpack(tmp_path / "to", os.urandom(4096), kind=kind)


def test_blob_of_another_size_or_digest_is_refused(image: Image, tmp_path: Path) -> None:
    layer = archive(*whole(image))
    right = descriptor_of(layer, LAYER)
    wrong = (
        replace(right, size=right.size - 1),
        replace(right, size=right.size + 1),
        replace(right, digest=f"sha256:{0:064}"),
    )
    for number, descriptor in enumerate(wrong):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(ArtefactInvalid, match="blob"):
            Unpacking(tmp_path / str(number)).layer(iter((layer,)), descriptor)


@pytest.fixture(params=["oci", "oci-dir"])
def layout(image: Image, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "layout"
    write_layout(image, path, "v1", compression=Compression.ZSTD, directory=request.param == "oci-dir")
    return path


def fetched(path: Path, config: Config) -> dict[str, bytes]:
    with exported(path) as source, fetching(config) as directory:
        return content(directory.fill(source).image.path)


def test_layout_comes_back_as_it_was(layout: Path, image: Image, config: Config) -> None:
    assert fetched(layout, config) == content(image.path)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_byte_is_refused_or_changes_nothing(
    data: st.DataObject, layout: Path, image: Image, config: Config
) -> None:
    """A header's spare bytes, and the index's annotations, mean nothing; every other byte is covered by a digest."""
    files = sorted(path for path in layout.rglob("*") if path.is_file()) if layout.is_dir() else [layout]
    path = data.draw(st.sampled_from(files))
    before = path.read_bytes()
    where = data.draw(st.integers(0, len(before) - 1))
    path.write_bytes(before[:where] + bytes((before[where] ^ 1 << data.draw(st.integers(0, 7)),)) + before[where + 1 :])
    try:
        assert fetched(layout, config) == content(image.path)
    except (Failure, NoRoom):
        pass
    finally:
        path.write_bytes(before)
    assert {path.name for path in config.checkpoint_root.iterdir()} == {"shop"}


def test_link_in_place_of_a_blob_is_not_followed(image: Image, tmp_path: Path, config: Config) -> None:
    write_layout(image, tmp_path / "layout", "v1", compression=Compression.NONE, directory=True)
    for blob in (tmp_path / "layout/blobs/sha256").iterdir():
        shutil.move(blob, tmp_path / blob.name)
        blob.symlink_to(tmp_path / blob.name)
    with pytest.raises((ArtefactInvalid, Failure)):
        fetched(tmp_path / "layout", config)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "[]", lambda text: "{}", lambda text: "{", lambda text: text.replace("sha256:", "../../../x:"),
        lambda text: text.replace('"size":', '"size":-'), lambda text: "[" * 100_000,
        lambda text: text.replace('"manifests":[', '"manifests":[{},'),
    ],
)  # fmt: skip
def test_index_that_cannot_be_read_is_refused(
    image: Image, tmp_path: Path, config: Config, spoil: Callable[[str], str]
) -> None:
    write_layout(image, tmp_path / "layout", "v1", compression=Compression.NONE, directory=True)
    index = tmp_path / "layout/index.json"
    index.write_text(spoil(index.read_text()))
    with pytest.raises(ArtefactInvalid):
        fetched(tmp_path / "layout", config)


def test_descriptor_knows_its_digest() -> None:
    assert descriptor_of(b"", LAYER) == Descriptor(
        LAYER, "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 0
    )
