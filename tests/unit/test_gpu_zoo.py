"""The zoo's table, its options and its figures, without a GPU; `tests/gpu` runs the programs on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.gpu.report import _arguments
from tests.gpu.zoo.figures import Lines, Wrong, prove
from tests.gpu.zoo.held import compared
from tests.gpu.zoo.passage import FAILED, PASSED, Outcome, Passage, all_passages, command, flags_of
from tests.gpu.zoo.payload import WORKS as PROGRAMS
from tests.gpu.zoo.payload import parser, program
from tests.gpu.zoo.results import difference, text
from tests.gpu.zoo.table import CYCLED, NAMES, REFUSED, WAYS, WORKS, ZOO, Entry, UnknownProgram, chosen

KNOWN = [work for works in PROGRAMS.values() for work in works]


def test_programs_have_names_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert len(set(KNOWN)) == len(KNOWN)
    assert set(CYCLED) <= set(NAMES)


@pytest.mark.parametrize("entry", ZOO, ids=NAMES)
def test_each_program_can_be_started(entry: Entry) -> None:
    assert callable(program(entry.work))
    argv = command(entry, entry.mib)
    told = parser().parse_args(argv[argv.index("tests.gpu.zoo.payload") + 1 :])
    assert (told.work, told.mib, told.prefix) == (entry.work, entry.mib, entry.prefix)
    assert entry.steps == (REFUSED if entry.refused else WORKS)
    assert set(entry.ways) <= set(WAYS)


def test_every_program_is_in_the_table() -> None:
    assert {entry.work for entry in ZOO} == set(KNOWN)


def test_only_the_way_through_the_arena_has_its_annotation() -> None:
    entry = next(entry for entry in ZOO if entry.name == "amp")
    assert "kybernate.io/arena=true" in flags_of(entry, "arena")
    assert "kybernate.io/arena=true" not in flags_of(entry, "plain")
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in flags_of(entry, "plain")


def test_names_choose_and_others_are_told_apart() -> None:
    entries, left_out = chosen("amp,nccl", gpus=1)
    assert [entry.name for entry in entries] == ["amp"]
    assert "2 GPUs" in left_out["nccl"]
    assert [entry.name for entry in chosen("copies,amp", pretended=True)[0]] == ["copies"]
    with pytest.raises(UnknownProgram, match="elephant"):
        chosen("elephant")


def test_options_choose_the_zoo_or_its_cycles() -> None:
    assert _arguments([]).zoo is None
    assert _arguments(["--zoo"]).zoo == "all"
    assert _arguments(["--zoo", "copies,amp", "--ways", "arena"]).ways == "arena"
    assert _arguments(["--cycles", "500", "--seed", "3"]).cycles == 500
    for wrong in (["--zoo", "elephant"], ["--ways", "sideways"]):
        with pytest.raises(SystemExit):
            _arguments(wrong)


def test_a_program_that_needs_the_arena_has_no_other_way() -> None:
    imported = [entry for entry in ZOO if entry.name == "imported"]
    assert [way for _, way in all_passages(imported, WAYS)] == ["arena"]


def test_figures_that_change_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = count()

    def changes_later() -> Iterator[tuple[str, int]]:
        yield "memory", 7 if next(rounds) < 3 else 8

    with pytest.raises(Wrong, match="memory: 8, and it was 7"):
        prove(changes_later)
    assert capsys.readouterr().out.startswith("figures ")


def test_figures_that_differ_by_themselves_are_not_blamed_on_a_suspend() -> None:
    numbers = count()

    def differs() -> Iterator[tuple[str, int]]:
        yield "sum", next(numbers)

    with pytest.raises(Wrong, match="before any suspend"):
        prove(differs)


def test_lines_are_numbered_and_rare(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = Lines("1: ", clock=lambda: now)
    for value in range(10):
        now += 0.03
        lines.figure(value)
    steps = [line.split(" checksum ")[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == [f"1: step {number}" for number in range(1, 6)]


def test_report_names_what_failed_and_where_figures_differ() -> None:
    entry = next(entry for entry in ZOO if entry.name == "amp")
    passed = [Outcome(step, PASSED, 1.0) for step in WORKS]
    plain = Passage(entry, "plain", passed, "figures 00ff\n")
    arena = Passage(entry, "arena", [*passed[:-1], Outcome(WORKS[-1], FAILED, 2.0, "a | b")], "figures 00fe\n")
    assert (plain.result, arena.result) == (PASSED, FAILED)
    said = text("# The zoo", [plain, arena], {"nccl": "it needs 2 GPUs"})
    assert "a \\| b" in said
    assert "- nccl: it needs 2 GPUs" in said
    assert difference(arena, [plain, arena]) == "other figures than without the arena"
    assert not difference(plain, [plain, arena])


def test_what_grows_with_the_cycles_is_a_leak() -> None:
    before = {"helper descriptors": 30, "arena MiB": 1000, "programs threads": 40}
    after = {"helper descriptors": 530, "arena MiB": 1010, "programs threads": 44}
    assert [one.name for one in compared(before, after) if not one.good] == ["helper descriptors"]
