"""`kybernate store simulate`: traces of files and made-up ones, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate.agent.settings import Settings
from tests.unit.cli.conftest import Node

TRACE = "time,workload,size\n0,a,1073741824\n60,b,1073741824\n120,a,1073741824\n"


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Settings, "load", Settings)
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    return file


def test_policies_are_compared(node: Node, trace: Path) -> None:
    found = node.json("store", "simulate", str(trace), "--capacity", "2GiB")
    assert [(one["policy"], one["uses"], one["hits"]) for one in found] == [
        ("lru", 3, 1),
        ("lfu", 3, 1),
        ("kybernate", 3, 1),
    ]
    shown = node.run("store", "simulate", str(trace), "--capacity", "2GiB").stdout.splitlines()
    assert shown[0].split() == ["POLICY", "HITS", "HIT", "BYTES", "MOVED", "WAITED"]
    assert shown[3].split() == ["kybernate", "33.3%", "33.3%", "2.00", "GiB", "8.25", "s"]


def test_speed_and_capacity_are_those_asked_for(node: Node, trace: Path) -> None:
    found = node.json("store", "simulate", str(trace), "--capacity", "0", "--from", "disk")
    assert [one["waited_seconds"] for one in found] == [3.0, 3.0, 3.0]


def test_made_up_trace_needs_no_file(node: Node, trace: Path) -> None:
    found = node.json("store", "simulate", "synthetic:scan")
    assert found[0]["uses"] > 1000


def test_what_cannot_be_read_is_named(node: Node, trace: Path) -> None:
    assert "there is no trace synthetic:none" in node.run("store", "simulate", "synthetic:none", status=1).stderr
    assert "the trace cannot be read" in node.run("store", "simulate", f"{trace}.not", status=1).stderr
    trace.write_text("nothing")
    assert "line 1" in node.run("store", "simulate", str(trace), status=1).stderr
    trace.write_text("time,workload\n")
    assert "the trace has no uses" in node.run("store", "simulate", str(trace), status=1).stderr
    trace.write_bytes(b"\xff\xfe\x00")
    assert "the trace cannot be read" in node.run("store", "simulate", str(trace), status=1).stderr
