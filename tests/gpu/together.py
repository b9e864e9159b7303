"""Several runs on one machine at the same time: `tests/gpu/together start PLAN --dir DIR`, then `wait --dir DIR`.

PLAN is a TOML file of jobs. Each runs on a node of its own (`tests/gpu/beside`), with the GPUs that it names, and
begins when these are free and no job before it waits for one of them. A job that fails or exceeds its time ends
alone, with all that its node has started. `start` returns immediately, and what it has started lives on after the
command that called it; `wait` returns after --seconds at most. It prints where each job is and what has been measured
so far, and packs all that they have written into --out: status.json, figures.json, logs.tar.gz.

    [[jobs]]
    name = "models"
    gpus = [0]             # numbers of device nodes
    seconds = 900          # then it is ended
    command = ["tests/gpu/serve", "--out", "{out}", "--root", "/run/node"]    # {out}: DIR/NAME
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
LOOK_SECONDS = 1.0
SAMPLE_SECONDS = 5.0
MOST_SHOWN = 12  # values of a list
SHOWN_LINES = 3  # of each job's log, by `wait`
PYTHON_LINES = {"PYTHONUNBUFFERED": "1"}
GPUS = ["nvidia-smi", "--query-gpu=index,memory.used,utilization.gpu", "--format=csv,noheader,nounits"]


@dataclass
class Job:
    """A line of the plan, and where it is: "waits", "runs", "passed", "failed", "ended" at its time."""

    name: str
    gpus: tuple[int, ...]
    seconds: float
    command: list[str]
    state: str = "waits"
    began: float = 0.0
    took: float = 0.0
    status: int | None = None
    process: subprocess.Popen[bytes] | None = None
    node: str = ""  # its mount namespace

    def told(self) -> dict[str, Any]:
        took = time.monotonic() - self.began if self.state == "runs" else self.took
        return {
            "name": self.name,
            "gpus": self.gpus,
            "state": self.state,
            "seconds": round(took),
            "status": self.status,
        }


def read_plan(path: Path, out: Path) -> list[Job]:
    """Return the jobs of a plan, which write into folders of `out`."""
    found = tomllib.loads(path.read_text())["jobs"]
    return [
        Job(
            one["name"],
            tuple(one["gpus"]),
            one["seconds"],
            [word.replace("{out}", str(out / one["name"])) for word in one["command"]],
        )
        for one in found
    ]


def startable(jobs: Sequence[Job]) -> list[Job]:
    """Return what can begin now: no job that runs, or that comes before and waits, has one of its GPUs."""
    taken = {gpu for one in jobs if one.state == "runs" for gpu in one.gpus}
    found = []
    for one in jobs:
        if one.state == "waits":
            if not taken & set(one.gpus):
                found.append(one)
            taken |= set(one.gpus)
    return found


@dataclass
class Runner:
    """Runs the jobs of a plan, and keeps status.json up to date."""

    jobs: list[Job]
    folder: Path
    pretended_mib: int = 0
    _sampled: float = field(default=0.0)

    def run(self) -> int:
        build_native()
        while any(one.state in ("waits", "runs") for one in self.jobs):
            for one in self.jobs:
                if one.state == "runs":
                    self._look(one)
            for one in startable(self.jobs):
                self._begin(one)
            self._tell()
            time.sleep(LOOK_SECONDS)
        self._tell()
        return int(any(one.state != "passed" for one in self.jobs))

    def _begin(self, job: Job) -> None:
        pretended = ["--pretended-mib", str(self.pretended_mib)] if self.pretended_mib else []
        own = range(len(job.gpus)) if self.pretended_mib else job.gpus  # a node's pretended GPUs are its own
        numbers = ",".join(map(str, own))
        beside = [sys.executable, "-m", "tests.gpu.beside", "--gpus", numbers, *pretended, "--", *job.command]
        with output_of(self.folder, job.name).open("ab") as log:
            job.process = subprocess.Popen(
                beside,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=CHECKOUT,
                env={**os.environ, **PYTHON_LINES},
                start_new_session=True,
            )
        job.state, job.began = "runs", time.monotonic()

    def _look(self, job: Job) -> None:
        assert job.process is not None
        job.node = namespace(job.process.pid) or job.node
        status = job.process.poll()
        late = time.monotonic() > job.began + job.seconds
        if status is None and not late:
            return
        job.state = "ended" if status is None else "failed" if status else "passed"
        job.took, job.status = time.monotonic() - job.began, status
        end_node(job.node)
        job.process.wait()

    def _tell(self) -> None:
        new = self.folder / "status.json.new"
        new.write_text(json.dumps([one.told() for one in self.jobs], indent=1) + "\n")
        new.replace(self.folder / "status.json")
        if time.monotonic() > self._sampled + SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            with (self.folder / "machine.jsonl").open("a") as lines:
                lines.write(json.dumps(sample()) + "\n")


def output_of(folder: Path, name: str) -> Path:
    """Return the file of a job's output, outside of its folder, which it may clean."""
    return folder / f"{name}.log"


def namespace(pid: int) -> str:
    """Return a process's mount namespace, "" where that is this one's own, or the process has ended."""
    try:
        found = str(Path(f"/proc/{pid}/ns/mnt").readlink())
    except OSError:
        return ""
    return "" if found == str(Path("/proc/self/ns/mnt").readlink()) else found


def end_node(node: str) -> None:
    """Kill all processes of a mount namespace, and those that they have started."""
    import psutil  # of the machine or the kit: plans and reports need none

    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if node and namespace(process.pid) == node:
            with suppress(psutil.NoSuchProcess):
                found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    for one in found.values():
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(found.values(), 30)


def build_native() -> None:
    """Compile the native parts once, before several nodes look for them."""
    from kybernate_shim.native import PRODUCTS, build  # of the checkout

    for product in PRODUCTS:
        build(product)


def sample() -> dict[str, Any]:
    """Return what the machine has free, and its GPUs' memory and load."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    gpus = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        gpus = subprocess.run(GPUS, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    return {
        "at": round(time.time(), 1),
        **{name: int(lines[name].split()[0]) >> 20 for name in ("MemTotal", "MemAvailable", "Shmem")},
        "load": os.getloadavg()[0],
        "gpus": gpus.splitlines(),
    }


# -- what is told


def figures(folder: Path) -> dict[str, Any]:
    """Return the figures of all jobs that have written some, by job and file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/*.json")):
        with suppress(ValueError):  # it is being written
            found[f"{path.parent.name}/{path.stem}"] = json.loads(path.read_text())
    return found


def brief(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures without long lists."""
    return {key: value for key, value in values.items() if not isinstance(value, list) or len(value) <= MOST_SHOWN}


def wait(folder: Path, seconds: float, out: Path | None, *, until_failure: bool = False) -> int:
    """Return 0 when all have passed, 1 when some have not, 3 when some still run.

    With `until_failure`, it also returns when one more has failed than had at the beginning.
    """
    until, before = time.monotonic() + seconds, failures(_status(folder))
    while (jobs := _status(folder)) is None or any(one["state"] in ("waits", "runs") for one in jobs):
        if time.monotonic() > until or (until_failure and failures(jobs) > before):
            break
        time.sleep(LOOK_SECONDS)
    print(shown(folder), flush=True)
    if out is not None:
        from tests.gpu.pack import pack

        out.mkdir(parents=True, exist_ok=True)
        (out / "figures.json").write_text(json.dumps(figures(folder), indent=1) + "\n")
        (out / "status.json").write_text(json.dumps(jobs, indent=1) + "\n")
        print("\n".join(pack(folder, out / "logs.tar.gz")), flush=True)
    if jobs is None or any(one["state"] in ("waits", "runs") for one in jobs):
        return 3
    return int(any(one["state"] != "passed" for one in jobs))


def failures(jobs: Sequence[Mapping[str, Any]] | None) -> int:
    return sum(one["state"] in ("failed", "ended") for one in jobs or ())


def shown(folder: Path) -> str:
    """Return where each job is, the end of its log, and its figures."""
    lines = []
    for one in _status(folder) or []:
        lines.append(f"== {one['name']} on {one['gpus']}: {one['state']} {one['seconds']} s, status {one['status']}")
        log = output_of(folder, one["name"])
        said = log.read_text(errors="replace").splitlines() if log.exists() else []
        lines += [f"   {line[:300]}" for line in said[-SHOWN_LINES:]]
    lines += [f"-- {name}: {json.dumps(brief(values))}" for name, values in figures(folder).items()]
    samples = folder / "machine.jsonl"
    if samples.exists() and (said := samples.read_text().splitlines()):
        least = min(said, key=lambda line: int(json.loads(line)["MemAvailable"]))
        lines += [f"machine now: {said[-1]}", f"least memory: {least}"]
    return "\n".join(lines)


def _status(folder: Path) -> list[dict[str, Any]] | None:
    try:
        found: list[dict[str, Any]] = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return found


def main(argv: Sequence[str]) -> int:
    """Return 0 when all that was waited for has passed."""
    arguments = _arguments(argv)
    folder = arguments.dir.absolute()
    if arguments.verb == "wait":
        return wait(folder, arguments.seconds, arguments.out, until_failure=arguments.until_failure)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = read_plan(arguments.plan, folder)
    if arguments.only:
        jobs = [one for one in jobs if one.name in arguments.only.split(",")]
    if arguments.verb == "run":
        return Runner(jobs, folder, arguments.pretended_mib).run()
    again = [sys.executable, "-m", "tests.gpu.together", "run", *argv[1:]]
    with (folder / "together.log").open("ab") as log:
        subprocess.Popen(again, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=CHECKOUT, start_new_session=True)
    return 0


def folder_of(argv: Sequence[str]) -> Path:
    """Return the results' folder of a command line without its verb."""
    folder: Path = _arguments(["run", *argv]).dir
    return folder.absolute()


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/together", description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("start", "run"):
        one = verbs.add_parser(name)
        one.add_argument("plan", type=Path)
        one.add_argument("--only", default="", metavar="NAMES", help="of the plan's jobs: a,b")
        one.add_argument("--pretended-mib", type=int, default=0, help="rehearse, with GPUs of this size")
    verbs.add_parser("wait").add_argument("--seconds", type=float, default=560.0)
    verbs.choices["wait"].add_argument("--until-failure", action="store_true", help="return also when one has failed")
    verbs.choices["wait"].add_argument("--out", type=Path, help="where status, figures and packed logs go")
    for one in verbs.choices.values():
        one.add_argument("--dir", type=Path, default=CHECKOUT / "build/together", help="of the jobs' results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
