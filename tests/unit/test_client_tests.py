"""The outcomes of containerd's client tests, from what a program of `go test` prints."""

from __future__ import annotations

from tests.system.client_tests import chosen, read

CUT_OFF = """\x16=== RUN   TestOne
\x16--- PASS: TestOne (0.31s)
panic: test timed out after 20m0s
\trunning tests:
\t\tTestHangs (19m59s)
\t\tTestParts/one (2m1s)

goroutine 1 [running]:
\t\tTestOther (1s)
"""


def test_outcome_is_that_of_each_test_and_of_none_of_its_parts() -> None:
    said = "=== RUN\n\x16--- PASS: TestA (0.10s)\n\x16    --- FAIL: TestA/b (0.00s)\n\x16--- FAIL: TestA/b (0.00s)\n"
    assert read(f"{said}\x16--- SKIP: TestC (0.00s)\n") == {"TestA": "passed", "TestC": "skipped"}


def test_outcome_is_found_after_what_a_container_prints_and_is_not_what_it_prints() -> None:
    said = "--- PASS: TestA (0.00s)\n    log: --- PASS: TestA (0.00s)\nno end of line\x16--- FAIL: TestA (1.20s)\n"
    assert read(said) == {"TestA": "failed"}


def test_test_that_runs_when_the_time_is_over_is_cut_off() -> None:
    assert read(CUT_OFF) == {"TestOne": "passed", "TestHangs": "cut off", "TestParts": "cut off"}


def test_tests_in_which_no_shim_has_a_part_are_left_out() -> None:
    names = ["TestImagePull", "TestContainerImage", "TestContentClient", "TestImport", "TestCheckpointRestore"]
    assert chosen(names) == ["TestContainerImage", "TestCheckpointRestore"]
