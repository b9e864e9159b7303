"""Processors by the memory that is near them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate_shim.linux.numa import parse_list, processors_near


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})]
)
def test_lists_of_the_kernel_are_read(text: str, numbers: set[int]) -> None:
    assert parse_list(text) == numbers


def nodes(folder: Path, *lists: str) -> Path:
    for number, text in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{text}\n")
    return folder


def test_only_the_threads_own_node_is_near(tmp_path: Path) -> None:
    ours = os.sched_getaffinity(0)
    here = min(ours)
    os.sched_setaffinity(0, {here})
    try:
        found = processors_near(os.getpid(), nodes(tmp_path, f"{here}", f"{here + 1}-4095"))
    finally:
        os.sched_setaffinity(0, ours)
    assert found == {here}


def test_without_a_node_that_is_ours_all_processors_are_as_near(tmp_path: Path) -> None:
    ours = os.sched_getaffinity(0)
    assert processors_near(os.getpid(), nodes(tmp_path)) == ours
    assert processors_near(2**22 + 1) == ours


def test_this_machine_has_processors_near_us() -> None:
    assert processors_near(os.getpid()) <= os.sched_getaffinity(0)
    assert processors_near(os.getpid())
