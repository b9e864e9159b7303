"""The comparison of two checkouts, its tables and its archive, without a GPU; `tests/gpu` runs it on a real one."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tarfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.against import compare, sides
from tests.gpu.against.compare import Part, Run, in_place
from tests.gpu.against.results import Sample, compared, text
from tests.gpu.against.serve import MOVED
from tests.gpu.against.sides import NoSuchSide, Package, Side, SideFailed
from tests.gpu.against.timeline import Span, slots, spans
from tests.gpu.pack import END_BYTES, LEFT_OUT, pack

ROOT = Path(__file__).parents[2]
BEGAN = 1_000_000.0
# A side that answers by a rule: "sleep" never, "die" by ending, everything else with what it was asked.
SERVE = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["ask"] == "die":
        sys.exit(7)
    while asked["ask"] == "sleep":
        time.sleep(60)
    print(json.dumps({"error": "no"} if asked["ask"] == "fail" else {"seconds": 1.5, "steps": asked}), flush=True)
"""


class FakeSide:
    """Answers immediately; `broken` is what it fails at."""

    def __init__(self, name: str, broken: str = "") -> None:
        self.name, self._broken = name, broken
        self.asked: list[str] = []
        self.ended = False

    def ask(self, verb: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        self.asked.append(verb)
        if verb == self._broken:
            raise SideFailed(f"{verb}: it broke")
        return {"seconds": {"old": 2.0, "new": 1.0}[self.name], "gpu_bytes": 80 << 30, "taken": 0, "free": 0}

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def run(tmp_path: Path) -> Run:
    arguments = argparse.Namespace(out=tmp_path, against=Path("/other"), pretended="")
    return Run(arguments, [], time.monotonic() + 1000)


def use(monkeypatch: pytest.MonkeyPatch, run: Run, old: FakeSide, new: FakeSide) -> None:
    """Have these sides in every part."""
    monkeypatch.setattr(compare, "Side", lambda package, kind, log: {"old": old, "new": new}[package.name])
    run.packages = [Package("old", run.out), Package("new", run.out)]


def test_both_sides_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    old, new = FakeSide("old"), FakeSide("new")
    use(monkeypatch, run, old, new)
    in_place(run, 0.01, changed=1.0, rounds=2, swaps=0)
    found = {one.what: one for one in compared(run.samples)}
    assert (found["suspend"].old, found["suspend"].new, found["suspend"].ratio) == (2.0, 1.0, 0.5)
    assert found["suspend"].n == found["resume"].n == (2, 2)
    assert found["suspend, first of a node"].n == (1, 1)
    order = [one.side for one in run.samples if one.what == "suspend"]
    assert order == ["new", "old", "old", "new"]
    assert (old.ended, new.ended) == (True, True)


def test_side_that_fails_is_reported_and_the_other_goes_on(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    old, new = FakeSide("old", broken="resume"), FakeSide("new")
    use(monkeypatch, run, old, new)
    in_place(run, 0.01, changed=1.0, rounds=2, swaps=0)
    assert run.failures == ["0.01 GiB, 100% changed, old: resume: it broke"]
    assert old.ended
    assert old.asked.count("resume") == 1
    found = {one.what: one for one in compared(run.samples)}
    assert found["resume"].n == (0, 2)
    assert found["resume"].ratio is None
    assert "old: resume: it broke" in (run.out / "against.md").read_text()


def test_nothing_begins_after_the_deadline(run: Run) -> None:
    run.until = time.monotonic() - 1
    assert list(run.rounds(5, "swap")) == []
    assert run.unreached == ["swap: 5 of 5 rounds, the time was over"]
    assert "swap: 5 of 5 rounds" in run.text()


def test_part_that_the_machine_has_no_memory_for_is_left_out(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(compare, "available", lambda: 60 << 30)
    in_place(run, 40, changed=1.0, rounds=2, swaps=0)
    assert "40 GiB, 100% changed: it needs 95 GiB of the machine's memory, of which 60 are free" in run.unreached


def test_part_that_the_gpu_has_no_room_for_is_left_out(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    use(monkeypatch, run, FakeSide("old"), FakeSide("new"))
    monkeypatch.setattr(compare, "available", lambda: 1000 << 30)
    in_place(run, 100, changed=1.0, rounds=2, swaps=0)
    assert run.unreached == ["100 GiB, 100% changed: the GPU has 80 GiB"]


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module = tmp_path / "tests/gpu/against/serve.py"
    module.parent.mkdir(parents=True)
    module.write_text(SERVE)
    monkeypatch.setattr(sides, "END_SECONDS", 0.2)
    one = Side(Package("old", tmp_path), "in-place", tmp_path / "log")
    yield one
    one.end()


def test_side_answers_what_it_was_asked(side: Side) -> None:
    answer = side.ask("suspend", 20, name="one")
    assert answer == {"seconds": 1.5, "steps": {"ask": "suspend", "name": "one"}}
    with pytest.raises(SideFailed, match="fail: no"):
        side.ask("fail", 20)


@pytest.mark.parametrize(
    ("verb", "seconds", "words"), [("die", 20, "ended with 7"), ("sleep", 0.01, "no answer after")]
)
def test_side_that_does_not_answer_fails(side: Side, verb: str, seconds: float, words: str) -> None:
    with pytest.raises(SideFailed, match=words):
        side.ask(verb, seconds)


def test_directory_without_the_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchSide, match="no checkout of this project"):
        Package.copied("old", tmp_path, tmp_path / "copy")


def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(BEGAN + at))
    return {"event": name, "time": f"{clock}.{round(at % 1 * 1000):03}000Z", **fields}


def restore() -> list[Span]:
    """A restore of 1 s: Create from 0.05 to 0.1, Start from 0.15, with 0.6 s in CRIU, and 0.1 s that no step covers."""
    shim = [
        event("task.created", 0.1),
        event("call.traced", 0.1, call="Create", total_ms=50.0),
        event("task.restored", 0.95, step_seconds={"compare": 0.1, "restore": 0.6}),
        event("call.traced", 0.95, call="Start", total_ms=800.0),
    ]
    helper = [event("arena.expected", 0.5, seconds=0.3), event("cuda.helper_started", 0.2)]
    criu = BEGAN + 0.8, "(00.000000) begins\n(00.100000) maps\n(00.500000) done\n"
    return spans(shim, helper, criu, BEGAN, 1.0)


def test_spans_of_the_shim_cover_the_whole_restore() -> None:
    mine = [one for one in restore() if one.who == "shim"]
    assert [one.name for one in mine] == [
        "ctr, containerd, start", "Create", "containerd", "compare", "restore", "between the steps",
        "until it computes",
    ]  # fmt: skip
    assert mine[0].begin == 0
    assert mine[-1].end == 1.0
    assert all(one.end == pytest.approx(next.begin, abs=1e-3) for one, next in pairwise(mine))


def test_step_of_criu_does_not_end_before_criu() -> None:
    shim = [
        event("task.created", 0.1),
        event("task.restored", 0.95, step_seconds={"compare": 0.1, "restore": 0.6}),
        event("call.traced", 0.95, call="Start", total_ms=800.0),
    ]
    found = spans(shim, [], (BEGAN + 0.9, "(00.000000) begins\n"), BEGAN, 1.0)
    steps = {one.name: one for one in found if one.who == "shim" and one.end > one.begin}
    assert (steps["restore"].begin, steps["restore"].end) == pytest.approx((0.3, 0.9), abs=1e-3)
    assert sum(one.end - one.begin for one in found if one.name == "between the steps") == pytest.approx(0.1, abs=1e-3)


def test_what_works_beside_the_shim_has_its_place() -> None:
    others = {one.name: one for one in restore() if one.who != "shim"}
    assert (others["arena.expected"].begin, others["arena.expected"].end) == pytest.approx((0.2, 0.5), abs=1e-3)
    assert (others["restores"].begin, others["restores"].end) == pytest.approx((0.3, 0.8), abs=1e-3)
    assert others["after 'maps'"].begin == pytest.approx(0.4, abs=1e-3)
    assert "cuda.helper_started" not in others


def test_each_slot_names_what_was_done_in_it() -> None:
    rows = slots(restore(), 1.0)
    assert len(rows) == 10
    assert rows[0] == "ctr, containerd, start 50, Create 50"
    assert rows[4].startswith("restore 100, (")
    assert "(helper arena.expected) 100" in rows[4]
    assert rows[9] == "between the steps 50, until it computes 50"


def test_report_has_medians_steps_and_time_of_both_sides() -> None:
    samples = [
        Sample(16, "restore", side, seconds, {"dump": seconds / 2}, restore() if side == "new" else ())
        for side, seconds in [("old", 4.0), ("old", 2.0), ("old", 3.0), ("new", 1.0)]
    ]
    said = text("# Heading", samples, ["16 GiB, old: a\nb"], ["swap: the time was over"])
    assert "| 16 | restore | 3.000 | 1.000 | 0.333 | 3 | 1 |" in said
    assert "| 16 | restore | dump | 1500.0 | 500.0 | -1000.0 |" in said
    assert "- 16 GiB, old: a b" in said
    assert "- swap: the time was over" in said
    assert "| 200 |  | compare 50, restore 50" in said
    assert json.loads(compared(samples)[0].line())["ratio"] == 0.3333


def test_archive_is_never_larger_than_allowed(tmp_path: Path) -> None:
    folder, archive = tmp_path / "out", tmp_path / "packed.tar.gz"
    folder.mkdir()
    (folder / "small.md").write_text("all of it")
    noise = random.Random(1).randbytes(3 << 20)
    (folder / "large.log").write_bytes(b"begin" + noise + b"end")
    told = pack(folder, archive, most=1 << 20)
    assert archive.stat().st_size <= 1 << 20
    with tarfile.open(archive) as tar:
        content = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    assert content["small.md"] == b"all of it"
    assert content["large.log"].startswith(b"begin")
    assert content["large.log"].endswith(b"end")
    assert len(content["large.log"]) < 2 * END_BYTES + 10
    assert b"large.log" in content[LEFT_OUT]
    assert any("large.log" in line for line in told)


def test_archive_that_fits_leaves_nothing_out(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_bytes(bytes(40 << 20))  # large, and nothing when it is packed
    archive = tmp_path / "packed.tar.gz"
    pack(tmp_path, archive)
    pack(tmp_path, archive)  # the archive of before is not part of it
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["one.log"]
        assert tar.getmember("one.log").size == 40 << 20


def test_part_asks_a_side_that_has_failed_no_more(run: Run) -> None:
    new = FakeSide("new")
    both = Part(run, "part", 1, {"new": new})  # type: ignore[dict-item]
    assert both.ask("old", "suspend") == {}
    assert both.turns() == ["new"]


def test_older_package_is_found_under_the_names_of_now(tmp_path: Path) -> None:
    """Without site packages: an editable installation would find the names of now in this checkout."""
    for name in MOVED.values():
        module = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f"NAME = {name!r}\n")
        for parent in module.relative_to(tmp_path).parents:
            (tmp_path / parent / "__init__.py").touch()
    (tmp_path / "kybernate_shim/checkpoint/gpu.py").touch()  # where there is a folder now
    asked = "; ".join(f"from {now} import NAME; print(NAME)" for now in MOVED)
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from tests.gpu.against import serve;"
        f" serve.find_moved(); {asked}"
    )
    found = subprocess.run([sys.executable, "-PS", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == list(MOVED.values())


@pytest.mark.parametrize("name", MOVED)
def test_names_of_now_exist(name: str) -> None:
    assert importlib.util.find_spec(name) is not None
