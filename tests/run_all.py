"""Run every suite and end with one summary: unit tests here, the others in nodes of the lab, in all of its lanes.

`run_all.py [NODES]`: so many nodes run side by side, one more than there are CPUs where it is not said, because
tests wait for containers for a part of their time. What they print is in build/tests; here, only failures are shown.
The unit tests begin while the lab is built, which waits for a network, and run in parallel with the first nodes.

A few tests that fail run once more when nothing else runs: on a busy machine they meet timeouts, also of programs that
are not ours. What passes then is named in the summary, with its first failure in build/tests, because it has found
something.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.lab import cache, go_programs  # the line above makes it importable
from tests.lab.go_programs import KEPT
from tests.lab.lanes import LANES as LAB_LANES
from tests.lanes import CLUSTERS, LANES, ONE_NODE, WITHOUT_LIMITS, order

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build/tests"
LAB_PYTHON = "/opt/kybernate/bin/python"
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|rerun)")
BANNER = re.compile(r"=+ (FAILURES|ERRORS) =+")
FAILED_NOW = re.compile(r"failed in (?:setup|call|teardown): (\S+?::.+?)(?:: |$).*")  # as tests/conftest.py says it
REPEATS = 4  # more failures than that are no coincidence


@dataclass
class Suite:
    """One pytest run. `lines` is its whole output; `alone` runs tests by their names."""

    name: str
    argv: list[str]
    alone: list[str]  # without the tests' names
    status: int = -1
    seconds: float = 0
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name.replace(' ', '-')}.log"

    def run(self) -> None:
        """Run it into its log; show failures when they happen, and one line when it ends."""
        begin = time.monotonic()
        with (
            self.log.open("w") as log,
            subprocess.Popen(
                self.argv,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                self.take(line.rstrip())
                log.write(line)
                log.flush()
        self.status, self.seconds = process.returncode, time.monotonic() - begin
        print(self.result(), flush=True)

    def take(self, line: str) -> None:
        self.lines.append(line)
        if failed := FAILED_NOW.search(line):
            print(f"[{self.name}] {failed[0]}", flush=True)

    def counts(self) -> dict[str, int]:
        """Return pytest's closing figures; a suite that printed none has run no test and counts as failed."""
        for line in reversed(self.lines):
            if found := COUNT.findall(line):
                return {name.rstrip("s") if name.startswith("error") else name: int(number) for number, name in found}
        return {}

    @property
    def good(self) -> bool:
        return self.status == 0 and self.counts().get("passed", 0) > 0

    def result(self) -> str:
        figures = ", ".join(f"{number} {name}" for name, number in self.counts().items()) or "ran no test"
        return f"{self.name:30} {'ok' if self.good else 'FAILED':7} {self.seconds:6.0f} s   {figures}"

    @property
    def failed(self) -> list[str]:
        """The tests that failed, in order."""
        return list(dict.fromkeys(self._failures()))

    def _failures(self) -> list[str]:
        """The test of each failure: one that fails in its call may fail in its teardown, too."""
        found = (FAILED_NOW.search(line) for line in self.lines)
        return [one[1] for one in found if one]

    def repeated(self) -> Suite | None:
        """Return the suite of what failed here; None where that is not known by its names."""
        counts = self.counts()
        failed = counts.get("failed", 0) + counts.get("error", 0)
        if not failed or len(self._failures()) != failed:
            return None
        return Suite(f"{self.name} again", [*self.alone, *self.failed], self.alone)

    def reasons(self) -> list[str]:
        """Return what it says of its failures; its last words, where it did not come to its end."""
        begins = [number for number, line in enumerate(self.lines) if BANNER.fullmatch(line)]
        return self.lines[begins[0] :] if begins else self.lines[-40:]


def in_lab(name: str, lane: str, *tests: object, flags: Sequence[str] = ()) -> Suite:
    """Return the suite of some tests in a node of a lane."""
    pytest = [LAB_PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=20", "--durations-min=3"]
    alone = [sys.executable, "tests/lab/run", *flags, lane, "--", *pytest]
    return Suite(f"{lane} {name}", [*alone, *map(str, tests)], alone)


def lanes_here() -> tuple[str, ...]:
    """Return the lanes that can be built on this machine; print why another one is left out."""
    missing = {}
    for lane in (*LANES, *CLUSTERS):
        reasons = (go_programs.lacking(name) for name in LAB_LANES[lane].programs)
        if reason := next(filter(None, reasons), None):
            missing[lane] = reason
            print(f"lane {lane} is left out, with its tests: {reason}", flush=True)
    return tuple(lane for lane in (*LANES, *CLUSTERS) if lane not in missing)


def suites_in_lab(lanes: Collection[str] = (*LANES, *CLUSTERS)) -> list[Suite]:
    """Return what runs in nodes of these lanes, in order."""
    found = [
        in_lab(
            part.name, lane, *(file.relative_to(ROOT) for file in part.files()),
            *(f"tests/{sample}" for sample in part.samples_in(lane)), flags=part.flags,
        )
        for part, lane in order()
        if lane in lanes
    ]  # fmt: skip
    v2 = ("tests/system/test_checkpoint.py", "tests/system/gpu/test_memory_limits.py", "-k", WITHOUT_LIMITS)
    return [*found, in_lab("cgroup v2", "trixie", *v2, flags=["--cgroup2"]), *suites_on_machine(lanes)]


def suites_on_machine(lanes: Collection[str]) -> list[Suite]:
    """Return what starts nodes of the lab by itself, and looks at the machine."""
    alone = [sys.executable, "-m", "pytest", "-q"]
    return [Suite("machine", [*alone, "tests/machine"], alone)] if set(CLUSTERS) <= set(lanes) else []


def suites_in_browser() -> list[Suite]:
    """Return the tests of the web page, where there is a browser."""
    alone = [sys.executable, "-m", "pytest", "-q"]
    return [Suite("browser", [*alone, "tests/browser"], alone)] if browser_here() else []


def browser_here() -> bool:
    """Return whether there is Chromium, which is installed where it is missing; print why tests are left out."""
    if shutil.which("chromium"):
        return True
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium"]
    try:
        for argv in (["apt-get", "update", "-qq"], install):
            subprocess.run(argv, env=quiet, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "").strip().splitlines() or [str(error)]
        print(f"the tests of the web page are left out: chromium cannot be installed: {said[-1]}", flush=True)
        return False
    return True


def build_lanes(lanes: Collection[str]) -> bool:
    """Build lanes of the lab, one after the other, so that the suites measure nothing but themselves."""
    with shared_go_cache() as environment:
        for lane in lanes:
            argv = ["--build-only", lane] if lane in CLUSTERS else [lane, "--", "true"]
            # NODES of `make test` is how many run side by side, and reaches the lab through make's environment.
            argv = [sys.executable, "tests/lab/run", *ONE_NODE, *argv]
            # close_fds: if this process is killed, a build that still runs keeps the lock of the Go cache.
            if subprocess.run(argv, cwd=ROOT, env=environment, close_fds=False, check=False).returncode:
                print(f"0 passed, 1 failed: the lab's lane {lane} does not start")
                return False
    return True


@contextmanager
def shared_go_cache() -> Iterator[dict[str, str]]:
    """Have the builds from Go modules share what they have in common: Go's own library, gRPC, Kubernetes' API.

    The cache grows to gigabytes and is removed afterwards; that of a run that was killed, by the next run.
    """
    if KEPT in os.environ:
        yield dict(os.environ)
        return
    directory, lock = cache.new_run(LOGS.parent / "go", uuid.uuid4().hex, lambda old: None)
    os.set_inheritable(lock, True)
    try:
        yield {**os.environ, KEPT: str(directory)}
    finally:
        shutil.rmtree(directory)
        os.close(lock)


def run_side_by_side(suites: Iterable[Suite], nodes: int) -> None:
    """Run the suites, so many at a time."""
    with ThreadPoolExecutor(nodes) as pool:
        for running in [pool.submit(suite.run) for suite in suites]:
            running.result()


def run_everything(
    unit: Suite, others: Sequence[Suite], nodes: int, lanes: Collection[str] = (*LANES, *CLUSTERS)
) -> bool:
    """Run all suites; return False where the lab cannot be built, after the unit tests alone."""
    with ThreadPoolExecutor(1) as another:
        running = another.submit(unit.run)
        built = build_lanes(lanes)
        if built:
            run_side_by_side(others, nodes)
        running.result()
    return built


def repeat_alone(suites: Sequence[Suite]) -> dict[str, Suite]:
    """Run what failed once more, one suite after the other; return those that are good then, by the first one's name.

    Nothing is repeated where more than REPEATS tests failed, or a suite ended without saying which.
    """
    again = {suite.name: suite.repeated() for suite in suites if not suite.good}
    if any(suite is None for suite in again.values()) or sum(len(suite.failed) for suite in suites) > REPEATS:
        return {}
    for suite in again.values():
        if suite is not None:
            suite.run()
    return {name: suite for name, suite in again.items() if suite is not None and suite.good}


def summary(suites: list[Suite], again: Mapping[str, Suite] = MappingProxyType({})) -> int:
    """Print what failed, one line a suite, and the totals; return the exit status.

    `again` has the suites whose failed tests have passed alone.
    """
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    for suite in suites:
        counts = suite.counts()
        repeated = again[suite.name].counts().get("passed", 0) if suite.name in again else 0
        totals["passed"] += counts.get("passed", 0) + repeated
        totals["skipped"] += counts.get("skipped", 0)
        if not repeated:
            totals["failed"] += counts.get("failed", 0) + counts.get("error", 0) or int(not suite.good)
    for suite in (suite for suite in suites if not suite.good):
        print(f"\n{suite.name}: all of its output is in {suite.log.relative_to(ROOT)}", *suite.reasons(), sep="\n")
    bad = [suite for suite in suites if not suite.good and suite.name not in again]
    print("=" * 78, *(suite.result() for suite in bad), sep="\n")
    for name in again:
        (suite,) = (suite for suite in suites if suite.name == name)
        print(*(f"failed with others, passed alone: [{name}] {test}" for test in suite.failed), sep="\n")
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**totals))
    return 1 if bad else 0


def main(argv: Sequence[str]) -> int:
    nodes = int(argv[0]) if argv else (os.cpu_count() or 1) + 1
    LOGS.mkdir(parents=True, exist_ok=True)
    alone = [sys.executable, "-m", "pytest", "-q"]
    unit = Suite("unit", [*alone, "-n", "auto", "--dist", "worksteal", "tests/unit"], alone)
    lanes = lanes_here()
    others = [*suites_in_lab(lanes), *suites_in_browser()]
    if not run_everything(unit, others, nodes, lanes):
        return 1
    return summary([unit, *others], repeat_alone([unit, *others]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
