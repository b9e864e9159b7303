"""The decisions of tests/gpu that need no GPU: which job begins, which device nodes a node has, what a run prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import beside, seats, together
from tests.gpu.together import Job, startable

PLANS = sorted(Path(together.__file__).with_name("plans").glob("*.toml"))


def job(name: str, *gpus: int, state: str = "waits") -> Job:
    return Job(name, gpus, 10, ["true"], state)


def names(jobs: list[Job]) -> list[str]:
    return [one.name for one in startable(jobs)]


def test_jobs_on_different_gpus_begin_together() -> None:
    assert names([job("a", 0), job("b", 1), job("c", 2, 3)]) == ["a", "b", "c"]


def test_a_job_waits_for_its_gpu() -> None:
    assert names([job("a", 0, state="runs"), job("b", 0), job("c", 1)]) == ["c"]
    assert names([job("a", 0, state="failed"), job("b", 0)]) == ["b"]


def test_a_job_of_two_gpus_is_not_passed_by_later_ones() -> None:
    assert names([job("a", 0, state="runs"), job("wide", 0, 1), job("b", 1), job("c", 2)]) == ["c"]


@pytest.mark.parametrize("plan", PLANS, ids=[one.stem for one in PLANS])
def test_plans_name_what_is_there(plan: Path, tmp_path: Path) -> None:
    jobs = together.read_plan(plan, tmp_path)
    assert len({one.name for one in jobs}) == len(jobs)
    for one in jobs:
        program = Path(one.command[0])
        assert program.is_absolute() or (together.CHECKOUT / program).is_file()
        assert str(tmp_path / one.name) in one.command
        assert one.gpus
        assert one.seconds > 0


def test_only_device_nodes_of_gpus_have_numbers() -> None:
    assert beside.numbers(["nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"]) == {0, 11}


def test_figures_are_written_before_a_scenario_ends(tmp_path: Path) -> None:
    figures = seats.Figures(tmp_path / "figures.json", {"of": 3})
    figures.tell(done=1)
    assert json.loads(figures.path.read_text()) == {"of": 3, "done": 1}
    figures.tell(done=2)  # within seconds of it
    assert json.loads(figures.path.read_text())["done"] == 1
    figures.tell(now=True)
    assert json.loads(figures.path.read_text())["done"] == 2


def test_the_spread_of_seconds_has_median_and_worst() -> None:
    assert seats.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "p90": 3.0, "p99": 3.0, "worst": 3.0}
    assert seats.spread([]) == {}


def test_what_is_shown_names_each_job_and_its_figures(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a.log").write_text("begins\nends\n")
    (tmp_path / "a/result.json").write_text(json.dumps({"failed": 0, "wakes": list(range(99))}))
    (tmp_path / "a/half.json").write_text("{")
    (tmp_path / "status.json").write_text(json.dumps([job("a", 0, state="passed").told()]))
    said = together.shown(tmp_path)
    assert "== a on [0]: passed" in said
    assert "   ends" in said
    assert '-- a/result: {"failed": 0}' in said
    assert list(together.figures(tmp_path)) == ["a/result"]
