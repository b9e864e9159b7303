"""Files of ConfigMaps and tokens in CRIU's images, which name those of the new pod afterwards."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kybernate_shim.checkpoint.criu.images import COMMON, FILES, DumpedMount, entries
from kybernate_shim.checkpoint.criu.opened import FILES_FILE, REGULAR, REMAP_FILE, REMAPS, remaps
from kybernate_shim.checkpoint.volumes.renewed import latest, mapped, renew
from kybernate_shim.messages import criu_pb2 as criu

UPDATE = "..2026_11_26_10_35_31.3106220811"
CONFIG = DumpedMount("/config", "ext4", "/config", "/", 7, 1, False, 1)
DATA = DumpedMount("/data", "ext4", "/data", "/", 8, 1, True, 1)


def write(path: Path, magic: int, *messages: Message) -> None:
    content = struct.pack("<II", COMMON, magic)
    for message in messages:
        data = message.SerializeToString()
        content += struct.pack("<I", len(data)) + data
    path.write_bytes(content)


def regular(number: int, name: str, mount: int) -> criu.File:
    entry = criu.RegularFile(flags=0, name=name.encode(), mount=mount, size=10, mode=0o100644)
    return criu.File(type=REGULAR, id=number, regular=entry)


def test_open_file_names_the_latest_update_of_any_size(tmp_path: Path) -> None:
    files = regular(1, f"config/{UPDATE}/key", 7), regular(2, f"data/{UPDATE}/key", 8)
    write(tmp_path / FILES_FILE, FILES, *files)
    write(tmp_path / REMAP_FILE, REMAPS, *(criu.Remap(file=n, target=n, kind=criu.Remap.GHOST) for n in (1, 2)))
    renew(tmp_path, [CONFIG, DATA], {"/config"})
    one, other = entries(tmp_path / FILES_FILE, FILES, criu.File)
    assert one.regular.name == b"config/..data/key"
    assert not one.regular.HasField("size")
    assert not one.regular.HasField("mode")
    assert one.regular.HasField("flags"), "CRIU wants it, although it is 0"
    assert other == files[1]
    assert [remap.file for remap in remaps(tmp_path)] == [2]


def test_watch_of_inotify_is_one_of_the_latest_update(tmp_path: Path) -> None:
    watch = criu.Inotify.Watch(file=criu.FileHandle(path=f"/config/{UPDATE}/key".encode()))
    write(tmp_path / FILES_FILE, FILES, criu.File(type=8, id=1, inotify=criu.Inotify(watches=[watch])))
    renew(tmp_path, [CONFIG], {"/config"})
    (found,) = entries(tmp_path / FILES_FILE, FILES, criu.File)
    assert found.inotify.watches[0].file.path == b"/config/..data/key"


def test_image_without_such_files_stays_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / FILES_FILE, FILES, regular(1, "data/file", 8))
    before = (tmp_path / FILES_FILE).stat()
    renew(tmp_path, [CONFIG, DATA], {"/config"})
    assert (tmp_path / FILES_FILE).stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (f"config/{UPDATE}/a/b", "config/..data/a/b"),
        (f"/config/{UPDATE}", "/config/..data"),
        (f"config/sub/{UPDATE}/key", f"config/sub/{UPDATE}/key"),
        ("config/..data/key", "config/..data/key"),
        ("config", "config"),
        (f"configs/{UPDATE}/key", f"configs/{UPDATE}/key"),
        (f"config/{UPDATE}x/key", f"config/{UPDATE}x/key"),
    ],
)
def test_only_the_directory_of_an_update_is_replaced(name: str, named: str) -> None:
    assert latest(name.encode(), "/config") == named.encode()


def test_mapped_file_is_named_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("value")
    with (tmp_path / "key").open("rb") as file, mmap.mmap(file.fileno(), 5, prot=mmap.PROT_READ):
        (found,) = mapped([os.getpid()], {str(tmp_path)})
        assert str(tmp_path / "key") in found
        assert list(mapped([os.getpid(), 1 << 30], {str(tmp_path / "k")})) == []
