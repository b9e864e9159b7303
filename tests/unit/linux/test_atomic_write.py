"""A file's content is replaced as a whole, or not at all."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kybernate_shim.linux.atomic_write import replace_file, replacing


def test_new_content_is_there_at_the_end_and_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with replacing(file) as new:
        new.write("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def fail() -> None:
        with replacing(file) as new:
            new.write("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the kernel, in order, with the names of the files."""
    made: list[str] = []
    fsync, rename, link = os.fsync, os.replace, os.link

    def synced(fd: int) -> None:
        made.append(f"fsync {os.readlink(f'/proc/self/fd/{fd}')}: {os.fstat(fd).st_size} bytes")  # noqa: PTH115
        fsync(fd)

    def renamed(source: Path, target: Path) -> None:
        made.append(f"rename {source} {target}")
        rename(source, target)

    def linked(source: Path, target: Path) -> None:
        made.append(f"link {source} {target}")
        link(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(os, "link", linked)
    return made


@pytest.mark.parametrize(("keep", "naming"), [(False, "rename"), (True, "link")])
def test_content_is_on_the_disk_before_its_name_and_both_before_the_return(
    tmp_path: Path, calls: list[str], keep: bool, naming: str
) -> None:
    file, staging = tmp_path / "file", tmp_path / "staging"
    size = tmp_path.stat().st_size
    replace_file(file, b"new", durable=True, keep=keep, staging="staging")
    assert calls == [f"fsync {staging}: 3 bytes", f"{naming} {staging} {file}", f"fsync {tmp_path}: {size} bytes"]


def test_nothing_waits_for_the_disk_unless_it_has_to(tmp_path: Path, calls: list[str]) -> None:
    replace_file(tmp_path / "file", "new")
    assert [call.partition(" ")[0] for call in calls] == ["rename"]


def test_file_that_is_kept_is_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, "first", keep=True)
    replace_file(file, "second", keep=True)
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_draft_of_a_killed_process_is_replaced_with_no_harm_to_what_else_it_names(tmp_path: Path) -> None:
    file, staging = tmp_path / "file", tmp_path / "staging"
    file.write_text("old")
    staging.hardlink_to(file)  # as it is left between link and unlink
    replace_file(tmp_path / "other", "new", staging="staging")
    assert file.read_text() == "old"
    assert (tmp_path / "other").read_text() == "new"


def test_mode_is_as_asked_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        replace_file(tmp_path / "program", b"", mode=0o755)
    finally:
        os.umask(before)
    assert (tmp_path / "program").stat().st_mode & 0o777 == 0o755


def test_threads_that_write_the_same_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    contents = [str(number) * 4096 for number in range(8)]
    together = threading.Barrier(len(contents))

    def write(content: str) -> None:
        together.wait()
        for _ in range(20):
            replace_file(tmp_path / "file", content)
            assert (tmp_path / "file").read_text() in contents

    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(write, contents))
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
