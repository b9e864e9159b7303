"""Which lanes `make bench` measures: those that have a figure that is wanted, and none where a name is mistyped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.bench import cluster_start, groups, lanes
from tests.lab import cli

IN_CLUSTER = ["cluster.memory", "cluster.idle", "cluster.pod"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What runs in the lab in place of it: the lane, and the figures by their names."""
    found: list[tuple[str, list[str]]] = []

    def call(argv: Sequence[str]) -> int:
        parsed = cli.parse(argv[2:])
        assert parsed.nodes == 1
        figures = parsed.command[parsed.command.index("--lane") + 2 :]
        found.append((parsed.lane, figures))
        return int("start.exec" in figures and parsed.lane == "trixie")  # as if it missed its bar

    monkeypatch.setattr(lanes.subprocess, "call", call)
    monkeypatch.setenv("NODES", "4")
    return found


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["start.run-*"], {"trixie": ["start.run-detached", "start.run-to-end"]}),
        (["cluster.pod", "cluster.[mi]*"], {"cluster": IN_CLUSTER}),
        (["agent.rss", "cluster.pod"], {"trixie": ["agent.rss"], "cluster": ["cluster.pod"]}),
        (["--lane", "next", "agent.rss"], {"next": ["agent.rss"]}),
        (["--lane", "cluster-trixie", "*.memory"], {"cluster-trixie": ["cluster.memory"]}),
    ],
)
def test_lanes_that_have_no_such_figure_are_left_out(
    started: list[tuple[str, list[str]]], argv: list[str], expected: dict[str, list[str]]
) -> None:
    both = {"trixie": expected["trixie"], "sid": expected["trixie"]} if "trixie" in expected else {}
    assert lanes.main(argv) == 0
    assert dict(started) == {**both, **expected}


def test_both_debians_are_measured_where_nothing_is_named(started: list[tuple[str, list[str]]]) -> None:
    assert lanes.main([]) == 1, "the bar that one lane missed fails the command"
    assert dict(started) == {lane: groups.names(lane) for lane in ("trixie", "sid")}


@pytest.mark.parametrize(
    "argv", [["restart.*"], ["start.*", "cluster.pods"], ["--lane=trixie", "cluster.*"], ["--lane=cluster", "start.*"]]
)
def test_name_of_no_figure_is_refused(
    started: list[tuple[str, list[str]]], argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert lanes.main(argv) == 2
    assert started == []
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_starts_of_a_cluster_are_compared_with_their_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(cluster_start, "_start", lambda lane, nodes: 10.0 * nodes)
    monkeypatch.setattr(lanes, "record", kept.extend)
    assert lanes.main(["cluster.start-1"]) == 0
    assert lanes.main(["cluster.start-*"]) == 1
    assert [(one.name, one.lane, one.ours, one.stock, one.good) for one in kept[1:]] == [
        ("cluster.start-1", "cluster", 10, 12, True),
        ("cluster.start-3", "cluster", 30, 25, False),
    ]
