"""Run every suite and end with one summary: unit tests here, contract and system tests in the lanes of the lab.

The lanes run side by side, one per core, because most of their time is spent waiting for containers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAB_PYTHON = "/opt/kybernate/bin/python"
LANES = ("trixie", "sid")
WITHOUT_LIMITS = "not (pod or cri or container_of_two)"  # on cgroup v2 beside v1's controllers; pods ask for limits
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)")


@dataclass
class Suite:
    """One pytest run. `lines` is its whole output, shown line by line as it comes, each with the suite's name."""

    name: str
    argv: list[str]
    status: int = -1
    seconds: float = 0
    lines: list[str] = field(default_factory=list)

    def run(self) -> None:
        begin = time.monotonic()
        with subprocess.Popen(
            self.argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.lines.append(line.rstrip())
                print(f"[{self.name}] {line.rstrip()}", flush=True)
        self.status, self.seconds = process.returncode, time.monotonic() - begin

    def counts(self) -> dict[str, int]:
        """Return pytest's closing figures; a suite that printed none has run no test and counts as failed."""
        for line in reversed(self.lines):
            if found := COUNT.findall(line):
                return {name.rstrip("s") if name.startswith("error") else name: int(number) for number, name in found}
        return {}

    @property
    def good(self) -> bool:
        return self.status == 0 and self.counts().get("passed", 0) > 0


def in_lab(name: str, *tests: str, flags: Sequence[str] = ()) -> Suite:
    """Return the suite of some tests in the lane that `name` begins with."""
    pytest = [LAB_PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    return Suite(name, [sys.executable, "tests/lab/run", *flags, name.partition("+")[0], "--", *pytest])


def main() -> int:
    """Build the lab's lanes first, one after the other, so that the suites measure nothing but themselves."""
    for lane in LANES:
        built = subprocess.run([sys.executable, "tests/lab/run", lane, "--", "true"], cwd=ROOT, check=False)
        if built.returncode:
            print(f"0 passed, 1 failed: the lab's lane {lane} does not start")
            return 1
    suites = [Suite("unit", [sys.executable, "-m", "pytest", "-n", "auto", "tests/unit"])]
    suites[0].run()
    lanes = [[in_lab(lane, "tests/contract", "tests/system", "tests/hostile")] for lane in LANES]
    lanes[1].append(in_lab("sid+faults", "tests/faults"))  # of the pretended card: the lane makes no difference
    lanes[0].append(in_lab("trixie+v2", "tests/system/test_checkpoint.py", "-k", WITHOUT_LIMITS, flags=["--cgroup2"]))
    threads = [threading.Thread(target=run_in_turn, args=[lane]) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summary(suites + [suite for lane in lanes for suite in lane])


def run_in_turn(suites: Sequence[Suite]) -> None:
    for suite in suites:
        suite.run()


def summary(suites: list[Suite]) -> int:
    """Print one line a suite and the totals; return the exit status."""
    print("\n" + "=" * 78)
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    for suite in suites:
        counts = suite.counts()
        totals["passed"] += counts.get("passed", 0)
        totals["skipped"] += counts.get("skipped", 0)
        totals["failed"] += counts.get("failed", 0) + counts.get("error", 0) or int(not suite.good)
        figures = ", ".join(f"{number} {name}" for name, number in counts.items()) or "ran no test"
        print(f"{suite.name:9} {'ok' if suite.good else 'FAILED':7} {suite.seconds:6.0f} s   {figures}")
        if not suite.good:
            named = [line for line in suite.lines if line.startswith(("FAILED", "ERROR"))]
            for line in named if counts else suite.lines[-40:]:  # its last words, where it did not come to its end
                print(f"           {line}")
    print("=" * 78)
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**totals))
    return 0 if all(suite.good for suite in suites) else 1


if __name__ == "__main__":
    sys.exit(main())
