"""Where an operation's logs lie, and which of them are kept."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kybernate_shim.config import Config
from kybernate_shim.task.checkpointing import WORK_SECONDS, WORKS_KEPT, work_directory

LONG_AGO = time.time() - 2 * WORK_SECONDS


def old_works(root: Path, count: int) -> None:
    for number in range(count):
        (root / f"ns.c{number:03}.restore").mkdir()
        (root / f"ns.c{number:03}.restore/restore.log").touch()
        os.utime(root / f"ns.c{number:03}.restore", (LONG_AGO + number, LONG_AGO + number))


def directory(root: Path) -> Path:
    return work_directory(replace(Config(), work_root=root), "ns", "new", "checkpoint")


def test_old_ones_are_removed_but_for_the_newest(tmp_path: Path) -> None:
    old_works(tmp_path, WORKS_KEPT + 3)
    assert directory(tmp_path) == tmp_path / "ns.new.checkpoint"
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "ns.c003.restore"
    assert len(list(tmp_path.iterdir())) == WORKS_KEPT


def test_young_ones_stay_because_they_may_be_in_use(tmp_path: Path) -> None:
    old_works(tmp_path, 1)
    for number in range(2 * WORKS_KEPT):
        (tmp_path / f"young{number}").mkdir()
    directory(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 * WORKS_KEPT


def test_first_operation_of_a_node_has_a_name_for_its_directory(tmp_path: Path) -> None:
    assert directory(tmp_path / "none") == tmp_path / "none/ns.new.checkpoint"


def test_daemons_that_remove_the_same_ones_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    old_works(tmp_path, WORKS_KEPT + 200)
    with ThreadPoolExecutor(8) as daemons:
        assert len(list(daemons.map(directory, [tmp_path] * 8))) == 8
    left = len(list(tmp_path.iterdir()))
    assert WORKS_KEPT - 8 < left <= WORKS_KEPT  # what one is removing looks new to another, and counts


def test_what_is_kept_of_pods_stays(tmp_path: Path) -> None:
    (tmp_path / "pods").mkdir()
    os.utime(tmp_path / "pods", (1, 1))
    old_works(tmp_path, WORKS_KEPT + 3)
    directory(tmp_path)
    assert (tmp_path / "pods").is_dir()
