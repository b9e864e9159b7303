"""Runs the specs by both handlers, each portion in a cluster of its own, repeats what differs, and prints the result.

The exit status is 1 where a spec passes by the stock handler and not by ours, and where specs have not run. The result
has the reports of earlier runs as well where some of the portions run: those of this commit and of the same programs.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from tests.conformance import outcomes, progress, specs, table
from tests.conformance.outcomes import Outcome

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build/conformance"
HANDLERS = STOCK, OURS = "runc", "kybernate"
AGAIN = "again"
COMMIT, VERSIONS = ".commit", ".versions"  # next to each report
LAB = (sys.executable, "tests/lab/run", "--nodes=1")  # whatever the environment says
PROGRESS_SECONDS = 60
PROCESSES, SECONDS = 4, 3600
GRACE = 300  # for the cluster's start, and for the end of what is interrupted


def main(argv: Sequence[str]) -> int:
    arguments = _arguments(argv)
    if not (arguments.portions or arguments.focus):
        shutil.rmtree(RESULTS, ignore_errors=True)
    if status := _build():
        return status
    commit = commit_here()
    set_aside(lambda report: _text(report, COMMIT) == commit, "they are of another commit")
    if arguments.focus:
        ran = ["focus"]
        _run("focus", [f"--focus={arguments.focus}", f"--label-filter={' || '.join(specs.LABELS)}"], arguments, commit)
    else:
        ran = list(arguments.portions or specs.PORTIONS)
        for portion in ran:
            _run(portion, [f"--label-filter={specs.PORTIONS[portion]}"], arguments, commit)
    if versions := versions_of(ran):
        set_aside(lambda report: _text(report, VERSIONS) in versions, "their programs have other versions")
    _repeat(arguments, commit)
    if commit_here() != commit:
        print("the checkout has changed since the run began: not all reports are of one state of it", flush=True)
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


def _build() -> int:
    """Build what the lab lacks, with its words on the terminal; return the status of that."""
    print("the lab builds what its cache lacks; Kubernetes' end-to-end program takes many minutes, once", flush=True)
    return subprocess.call([*LAB, "--build-only", "conformance"], cwd=ROOT)


def commit_here() -> str:
    """Return the commit of the checkout, with a hash of what has changed since."""
    try:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
        changes = subprocess.check_output(["git", "diff", "HEAD"], cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+{hashlib.sha256(changes).hexdigest()[:12]}" if changes else commit


def set_aside(kept: Callable[[Path], bool], why: str) -> None:
    """Move the reports that are not to be kept, with their logs, to where no result has them; say which."""
    left = [report for handler in HANDLERS for report in _reports(handler) if not kept(report)]
    for report in left:
        place = RESULTS / "older" / report.parent.name
        place.mkdir(parents=True, exist_ok=True)
        for file in report.parent.glob(f"{report.stem}.*"):
            file.replace(place / file.name)
    if left:
        names = ", ".join(f"{report.stem} by {report.parent.name}" for report in left)
        print(f"reports are left out and moved to build/conformance/older, because {why}: {names}", flush=True)


def versions_of(portions: Sequence[str]) -> set[str]:
    """Return the versions of what has run, of the portions that came to a report."""
    reports = [report for handler in HANDLERS for report in _reports(handler) if report.stem in portions]
    return {_text(report, VERSIONS) for report in reports}


def _text(report: Path, suffix: str) -> str:
    file = report.with_suffix(suffix)
    return file.read_text().strip() if file.exists() else ""


def _run(portion: str, choice: Sequence[str], arguments: argparse.Namespace, commit: str) -> None:
    """Run a portion by both handlers, side by side, so that what else the machine does disturbs both alike.

    A line each minute says how far they are.
    """
    options = [*choice, "--no-color", f"--procs={arguments.processes}", f"--timeout={arguments.seconds}s"]
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(_run_by, handler, portion, options, arguments.seconds, commit) for handler in HANDLERS]
        while wait(runs, PROGRESS_SECONDS).not_done:
            print(f"{portion}: {'; '.join(_progress(handler, portion) for handler in HANDLERS)}", flush=True)
        for run in runs:
            run.result()


def _progress(handler: str, portion: str) -> str:
    log = RESULTS / handler / f"{portion}.log"
    return f"{handler} {progress.read(log.read_text(errors='replace') if log.exists() else '')}"


def _run_by(handler: str, portion: str, options: Sequence[str], seconds: int, commit: str) -> None:
    """Run a portion in a cluster with this handler as its default; what it prints is in a log next to its report."""
    report = RESULTS / handler / f"{portion}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    for old in report.parent.glob(f"{portion}.*"):
        old.unlink()
    report.with_suffix(COMMIT).write_text(f"{commit}\n")
    begin, log = time.monotonic(), report.with_suffix(".log")
    inside = ["/opt/kybernate/bin/python", "-m", "tests.conformance.node", f"/src/{report.relative_to(ROOT)}"]
    argv = [*LAB, f"--default-runtime={handler}", "conformance", "--", *inside, *options]
    with log.open("w") as output:
        subprocess.run(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            timeout=seconds + GRACE, check=False,
        )  # fmt: skip
    found = _read(report) if report.exists() else {}
    figures = f"{len(found)} specs, {len(outcomes.unsuccessful(found))} failed, {time.monotonic() - begin:.0f} s"
    print(f"{portion} by {handler}: {figures}, see {log.relative_to(ROOT)}", flush=True)


def _repeat(arguments: argparse.Namespace, commit: str) -> None:
    """Run what differs once more by both handlers, so that a spec that fails now and then is no difference."""
    differing = outcomes.differences(all_outcomes(STOCK), all_outcomes(OURS))
    if differing:
        print(f"{len(differing)} specs differ and are repeated by both handlers", flush=True)
        focus = [f"--focus={one}" for one in specs.exactly(one.name for one in differing)]
        _run(f"{AGAIN}-{len(_reports(STOCK, AGAIN)) + 1}", focus, arguments, commit)


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
