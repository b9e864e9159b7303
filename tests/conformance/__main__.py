"""Runs the specs by both handlers, each portion in a cluster of its own, repeats what differs, and prints the result.

The exit status is 1 where a spec passes by the stock handler and not by ours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conformance import outcomes, specs, table
from tests.conformance.outcomes import Outcome

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build/conformance"
STOCK, OURS = "runc", "kybernate"
AGAIN = "again"
PROCESSES, SECONDS = 4, 3600
GRACE = 300  # for the cluster's start, and for the end of what is interrupted


def main(argv: Sequence[str]) -> int:
    arguments = _arguments(argv)
    if not (arguments.portions or arguments.focus):
        shutil.rmtree(RESULTS, ignore_errors=True)
    if arguments.focus:
        _run("focus", [f"--focus={arguments.focus}", f"--label-filter={' || '.join(specs.LABELS)}"], arguments)
    else:
        for portion in arguments.portions or specs.PORTIONS:
            _run(portion, [f"--label-filter={specs.PORTIONS[portion]}"], arguments)
    _repeat(arguments)
    stock, ours = (all_outcomes(handler) for handler in (STOCK, OURS))
    text = table.render(stock, ours, {name for report in _reports(STOCK, AGAIN) for name in _read(report)})
    (RESULTS / "result.md").write_text(text)
    print(text)
    return int(any(one.defect for one in outcomes.differences(stock, ours)))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument("portions", nargs="*", choices=[*specs.PORTIONS, []], metavar="PORTION", help="all by default")
    parser.add_argument("--focus", help="run the specs whose names match this expression instead")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="how many specs run at a time")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="after which a portion is interrupted")
    return parser.parse_args(argv)


def _run(portion: str, choice: Sequence[str], arguments: argparse.Namespace) -> None:
    """Run a portion by both handlers; what it prints is in a log beside its report."""
    options = [*choice, *(f"--skip={one.pattern}" for one in specs.EXCLUSIONS), "--no-color", "--keep-going"]
    options += [f"--procs={arguments.processes}", f"--timeout={arguments.seconds}s"]
    for handler in (STOCK, OURS):
        report = RESULTS / handler / f"{portion}.json"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        print(f"{portion} by {handler}: begins, its log is {report.with_suffix('.log').relative_to(ROOT)}", flush=True)
        inside = ["/opt/kybernate/bin/python", "-m", "tests.conformance.node", f"/src/{report.relative_to(ROOT)}"]
        argv = [sys.executable, "tests/lab/run", "conformance", "--", *inside, *options]
        with report.with_suffix(".log").open("w") as log:
            subprocess.run(
                argv, cwd=ROOT, env={**os.environ, "DEFAULT_RUNTIME": handler}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, timeout=arguments.seconds + GRACE, check=False,
            )  # fmt: skip
        found = outcomes.read(report.read_text()) if report.exists() else {}
        print(f"{portion} by {handler}: {len(found)} specs, {len(outcomes.unsuccessful(found))} failed", flush=True)


def _repeat(arguments: argparse.Namespace) -> None:
    """Run what differs once more by both handlers, so that a spec that fails now and then is no difference."""
    differing = outcomes.differences(all_outcomes(STOCK), all_outcomes(OURS))
    if differing:
        print(f"{len(differing)} specs differ and are repeated by both handlers", flush=True)
        focus = [f"--focus={one}" for one in specs.exactly(one.name for one in differing)]
        _run(f"{AGAIN}-{len(_reports(STOCK, AGAIN)) + 1}", focus, arguments)


def all_outcomes(handler: str) -> dict[str, Outcome]:
    """Return the last outcome of each spec by a handler: of those that were repeated, that of the repetition."""
    again = _reports(handler, AGAIN)
    first = [report for report in _reports(handler) if report not in again]
    return {name: one for report in first + again for name, one in _read(report).items()}


def _reports(handler: str, prefix: str = "") -> list[Path]:
    return sorted((RESULTS / handler).glob(f"{prefix}*.json"))


def _read(report: Path) -> dict[str, Outcome]:
    return outcomes.read(report.read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
