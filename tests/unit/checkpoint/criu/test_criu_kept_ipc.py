"""Objects of System V that a pod has already are left out of what CRIU makes again."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kybernate_shim.checkpoint.criu import kept_ipc
from kybernate_shim.checkpoint.criu.kept_ipc import remove_unused, without_kept
from kybernate_shim.errors import Damaged
from kybernate_shim.messages import criu_pb2 as criu
from kybernate_shim.oci.spec import Spec

T = TypeVar("T")
POD = Spec({"linux": {"namespaces": [{"type": "ipc", "path": "/proc/1/ns/ipc"}]}})
TABLES = {
    "shm": """       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid
      4660          0  1666                  4096     7     7      1  1000  1000     0     0
      4662          2   600         1099511627776     7     7      0     0     0     0     0
      4669          5   600                  4096     7     7      0     0     0     0     0
""",
    "sem": """       key      semid perms      nsems   uid   gid  cuid  cgid      otime      ctime
-559038737          3   600          3     0     0     0     0          0          0
""",
    "msg": """       key      msqid perms      cbytes       qnum lspid lrpid   uid   gid  cuid  cgid
         9          2   640          11          2     7     0     5     6     5     6
""",
}


def entry(message: Any, content: bytes = b"") -> bytes:
    data: bytes = message.SerializeToString()
    return struct.pack("<I", len(data)) + data + content


def described(key: int, id: int, mode: int, user: int, group: int) -> criu.IpcDescription:
    return criu.IpcDescription(key=key, id=id, mode=mode, user=user, group=group, creator=1000)


HEAD = b"12345678"
SEGMENT = entry(criu.IpcSegment(description=described(4660, 0, 0o666, 1000, 1000), size=4096), b"s" * 4096)
OTHER = entry(criu.IpcSegment(description=described(4661, 1, 0o600, 1000, 1000), size=4097), b"t" * 4100)
PAGES = entry(criu.IpcSegment(description=described(4662, 2, 0o600, 0, 0), size=1 << 40, in_pagemaps=True))
SEMAPHORES = entry(criu.IpcSemaphores(description=described(0xDEADBEEF, 3, 0o600, 0, 0), count=3), b"n" * 8)
MESSAGES = entry(criu.IpcMessage(size=3), b"m" * 8) + entry(criu.IpcMessage(size=8), b"m" * 8)
QUEUE = entry(criu.IpcQueue(description=described(9, 2, 0o640, 5, 6), count=2), MESSAGES)


@pytest.fixture(autouse=True)
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    def work_here(namespace: Path, kind: int, work: Callable[[], T]) -> T:
        return work()

    monkeypatch.setattr(kept_ipc, "in_namespace", work_here)
    monkeypatch.setattr(kept_ipc, "is_nodes_namespace", lambda path, kind: False)
    monkeypatch.setattr(kept_ipc, "text_of", lambda path: TABLES[path.rpartition("/")[2]])


def image(place: Path, **files: bytes) -> Path:
    for name, content in files.items():
        (place / f"ipcns-{name}-11.img").write_bytes(HEAD + content)
    return place


def test_objects_that_the_pod_has_are_left_out(tmp_path: Path) -> None:
    there = image(tmp_path, shm=OTHER + SEGMENT + PAGES, sem=SEMAPHORES, msg=QUEUE)
    assert without_kept(there, POD) == {
        "ipcns-shm-11.img": HEAD + OTHER + PAGES, "ipcns-sem-11.img": HEAD, "ipcns-msg-11.img": HEAD,
    }  # fmt: skip


def test_other_objects_stay(tmp_path: Path) -> None:
    changed = SEMAPHORES.replace(b"\x30\x80\x03", b"\x30\x81\x03")  # its mode
    assert changed != SEMAPHORES
    assert without_kept(image(tmp_path, shm=OTHER + PAGES, sem=changed), POD) == {}


def test_container_with_a_namespace_of_its_own_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_kept(image(tmp_path, shm=SEGMENT), Spec({"linux": {"namespaces": [{"type": "ipc"}]}})) == {}
    monkeypatch.setattr(kept_ipc, "is_nodes_namespace", lambda path, kind: True)
    assert without_kept(tmp_path, POD) == {}


@pytest.mark.parametrize(
    "content",
    [SEGMENT[:2], SEGMENT[:8], SEGMENT[:-1], struct.pack("<I", 1 << 30), struct.pack("<I", 3) + b"\xff\xff\xff"],
    ids=["length", "entry", "content", "large", "no message"],
)
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(Damaged, match=r"ipcns-shm-11\.img"):
        without_kept(image(tmp_path, shm=content), POD)


def test_segments_that_no_process_is_attached_to_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[int] = []

    class Library:
        def shmctl(self, id: int, command: int, _: None) -> None:
            removed.append(id)

    monkeypatch.setattr(kept_ipc, "library", Library)
    remove_unused(image(tmp_path, shm=SEGMENT + OTHER + PAGES), POD)
    assert removed == [2]
    remove_unused(tmp_path, Spec({}))
    assert removed == [2]
