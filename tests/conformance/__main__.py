"""Runs the specs by both handlers, each portion in a cluster of its own, repeats what differs, and prints the result.

The exit status is 1 where a spec passes by the stock handler and not by ours, and where specs have not run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conformance import outcomes, specs, table
from tests.conformance.outcomes import Outcome

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build/conformance"
HANDLERS = STOCK, OURS = "runc", "kybernate"
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
    repeated = {name for report in _reports(STOCK, AGAIN) for name in _read(report)}
    short = _short()
    text = table.render(stock, ours, repeated, short)
    (RESULTS / "result.md").write_text(text)
    print(text)
    return int(bool(short) or any(one.defect for one in outcomes.differences(stock, ours)))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument("portions", nargs="*", choices=[*specs.PORTIONS, []], metavar="PORTION", help="all by default")
    parser.add_argument("--focus", help="run the specs whose names match this expression instead")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="how many specs run at a time")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="after which a portion is interrupted")
    return parser.parse_args(argv)


def _run(portion: str, choice: Sequence[str], arguments: argparse.Namespace) -> None:
    """Run a portion by both handlers, side by side, so that what else the machine does disturbs both alike."""
    options = [*choice, "--no-color", f"--procs={arguments.processes}", f"--timeout={arguments.seconds}s"]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(_run_by, handler, portion, options, arguments.seconds) for handler in HANDLERS]:
            done.result()


def _run_by(handler: str, portion: str, options: Sequence[str], seconds: int) -> None:
    """Run a portion in a cluster with this handler as its default; what it prints is in a log next to its report."""
    report = RESULTS / handler / f"{portion}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    begin, log = time.monotonic(), report.with_suffix(".log")
    inside = ["/opt/kybernate/bin/python", "-m", "tests.conformance.node", f"/src/{report.relative_to(ROOT)}"]
    argv = [sys.executable, "tests/lab/run", f"--default-runtime={handler}", "conformance", "--", *inside, *options]
    with log.open("w") as output:
        subprocess.run(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            timeout=seconds + GRACE, check=False,
        )  # fmt: skip
    found = _read(report) if report.exists() else {}
    figures = f"{len(found)} specs, {len(outcomes.unsuccessful(found))} failed, {time.monotonic() - begin:.0f} s"
    print(f"{portion} by {handler}: {figures}, see {log.relative_to(ROOT)}", flush=True)


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


def _short() -> dict[str, list[str]]:
    """Return the portions of which specs are missing, by each handler, with the reasons."""
    reports = {f"{report.stem} by {handler}": report for handler in HANDLERS for report in _reports(handler)}
    found = {name: outcomes.shortfalls(report.read_text()) for name, report in reports.items()}
    return {name: reasons for name, reasons in found.items() if reasons}


def _reports(handler: str, prefix: str = "") -> list[Path]:
    return sorted((RESULTS / handler).glob(f"{prefix}*.json"))


def _read(report: Path) -> dict[str, Outcome]:
    return outcomes.read(report.read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
