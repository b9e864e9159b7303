"""Tests under the shim of containerd, the oracle, are repeated when they fail; those under ours never are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
import pytest
from tests.system.conftest import ctr  # the fixture with both shims
"""
FAILS_FIRST = """
import pathlib

def test_first_passage(ctr):
    mark = pathlib.Path(__file__).with_name(ctr.runtime)
    with mark.open("a") as passages:
        passages.write("x")
    assert mark.read_text() != "x", "the first passage"
"""
FAILS_ALWAYS = """
import pathlib

def test_always(ctr):
    with pathlib.Path(__file__).with_name(ctr.runtime).open("a") as passages:
        passages.write("x")
    assert False, "always"
"""
OURS, STOCK = "io.containerd.kybernate.v1", "io.containerd.runc.v2"


def passages(folder: Path, text: str) -> tuple[str, dict[str, int]]:
    """Run the test with both shims; return pytest's closing line, and how often it ran with each."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(text)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2], check=False)
    counted = {runtime: len((folder / runtime).read_text()) for runtime in (OURS, STOCK)}
    return done.stdout.splitlines()[-1], counted


def test_oracle_may_fail_once_and_our_shim_may_not(tmp_path: Path) -> None:
    closing, counted = passages(tmp_path, FAILS_FIRST)
    assert closing.startswith("1 failed, 1 passed, 1 rerun")
    assert counted == {OURS: 1, STOCK: 2}


def test_oracle_that_always_fails_is_a_failure(tmp_path: Path) -> None:
    closing, counted = passages(tmp_path, FAILS_ALWAYS)
    assert closing.startswith("2 failed, 2 rerun")
    assert counted == {OURS: 1, STOCK: 3}
