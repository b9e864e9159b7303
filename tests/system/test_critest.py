"""The validation suite of CRI has the same outcomes with our runtime as with containerd's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.system.critest import import_images, outcomes


def test_outcomes_are_those_of_the_stock_runtime(tmp_path: Path) -> None:
    if shutil.which("critest") is None:
        pytest.skip("the lane has no critest; `next` has")
    import_images(tmp_path)
    stock = outcomes("runc", tmp_path / "runc")
    ours = outcomes("kybernate", tmp_path / "kybernate")
    assert list(stock.values()).count("passed") > 50
    assert {spec: (outcome, stock[spec]) for spec, outcome in ours.items() if outcome != stock[spec]} == {}
