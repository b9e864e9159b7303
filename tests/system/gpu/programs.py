"""Containers that compute on pretended GPUs, or hold memory there, and whose numbers prove that they continue."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kybernate_shim.messages import shim_pb2
from kybernate_shim.ttrpc import Client
from tests.stillness import come_to_rest
from tests.system.checkpoints import PYTHON, ask
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.node import COMPUTES, GPUS, INSIDE, PROGRAMS
from tests.system.gpu.toolkit import visible

POLLING = ["--env", "COMPUTES_POLLS=2000"]  # microseconds, so that it costs a container next to nothing


def cgroup_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def mounts() -> list[str]:
    """Return ctr's flags for a container on this node: the programs and the GPUs' accounts."""
    return [
        "--mount", f"type=bind,src={PROGRAMS},dst={INSIDE},options=rbind:ro",
        "--mount", f"type=bind,src={GPUS},dst={GPUS},options=rbind:rw",
    ]  # fmt: skip


@dataclass
class Computing:
    """A container with programs that check every word of their memory on the GPU, and print a line a step."""

    id: str
    log: Path
    programs: int = 1

    def lines(self) -> list[str]:
        return self.log.read_text().split("\n")[:-1] if self.log.exists() else []

    def steps(self) -> list[int]:
        """Return the last step of each program; fails when one of them has found its memory changed."""
        last: dict[str, int] = {}
        for line in self.lines():
            found = re.fullmatch(r"(?:(\d+): )?step (\d+) checksum \w+", line)
            assert found, f"container {self.id} says: {line}"
            name, step = found[1] or "", int(found[2])
            assert name not in last or step == last[name] + 1, f"{line} follows step {last[name]}"
            last[name] = step
        return sorted(last.values())

    def computes_on(self, *, seconds: float = 20) -> None:
        """Every program continues, with the right numbers and none left out."""
        before = eventually(lambda: found if len(found := self.steps()) == self.programs else [], seconds=seconds)

        def went_on() -> bool:
            now = self.steps()
            return len(now) == self.programs and all(new > old + 2 for new, old in zip(now, before, strict=True))

        eventually(went_on, seconds=seconds)

    def stands_still(self) -> None:
        come_to_rest(self.pids())
        before = self.steps()
        time.sleep(0.3)
        assert self.steps() == before, f"{self.id} computes"

    def pids(self) -> list[int]:
        """Return its processes."""
        found = [process.pid for process in psutil.process_iter() if self.id in cgroup_of(process.pid)]
        assert found, f"{self.id} has no process"
        return found


def command(programs: int = 1, *, mib: int = 2, pause_ms: int = 20, devices: Sequence[int] = (0,)) -> list[str]:
    """Return what a container runs: one program, or several under a shell that marks their lines."""
    if programs == 1:
        return [COMPUTES, str(mib), str(pause_ms), str(devices[0])]
    mark = 'while read line; do echo "$number: $line"; done'
    starts = [
        f"number={number}; ({COMPUTES} {mib} {pause_ms} {devices[number % len(devices)]} | {mark}) &"
        for number in range(programs)
    ]
    return ["sh", "-c", f"{' '.join(starts)} wait"]


@contextmanager
def computing(
    ctr: Ctr,
    *argv: str,
    programs: int = 1,
    flags: Sequence[str] = (),
    log: Path | None = None,
    polls: bool = True,
    gives: Sequence[str] | None = None,
) -> Iterator[Computing]:
    """Start a container that computes on GPU 0, and wait for its first step.

    A `log` file that the caller names is kept. With `polls`, a thread of the container asks the GPU again and again
    whether work is done. `gives` are ctr's flags that give it the GPU.
    """
    id = ctr.new_id("gpu")
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    given, log = log, log or Path(f"/tmp/{id}.out")
    wanted = ["--log-uri", f"file://{log}", *mounts(), *(gives or visible(0)), *(POLLING if polls else ()), *flags]
    try:
        with own.running(*(argv or command(programs)), id=id, flags=wanted):
            container = Computing(id, log, programs)
            eventually(lambda: len(container.steps()) == programs, seconds=40)
            yield container
    finally:
        if given is None:
            log.unlink(missing_ok=True)


@contextmanager
def computing_again(
    ctr: Ctr,
    image: Path,
    log: Path,
    *,
    programs: int = 1,
    device: int = 0,
    flags: Sequence[str] = (),
    gives: Sequence[str] | None = None,
) -> Iterator[Computing]:
    """Restore an image into a new container, whose own command must not run."""
    id = ctr.new_id("gpu")
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    wanted = ["--log-uri", f"file://{log}", "--annotation", f"kybernate.io/restore-from={image}"]
    try:
        own.launch("false", id=id, flags=[*wanted, *mounts(), *(gives or visible(device)), *flags])
        yield Computing(id, log, programs)
    finally:
        own.remove(id)


class Holding:
    """A container with `holds.py`, which is asked and answers through pipes that it shares with the node."""

    def __init__(self, id: str, pieces: int) -> None:
        self.id = id
        self._asked, self._answered = pipes(id)
        self._content = [0] * pieces

    def fill(self, piece: int, value: int) -> None:
        self._content[piece] = value
        self.ask(f"fill {piece} {value}")

    def share(self) -> None:
        """Import memory, as from another process."""
        self.ask("share")

    def unshare(self) -> None:
        self.ask("unshare")

    def is_right(self) -> bool:
        """Tell whether the GPU's memory is what it was filled with."""
        return self.ask("content") == " ".join(map(str, self._content))

    def ask(self, question: str) -> str:
        self.begin(question)
        return self.told()

    def begin(self, question: str) -> None:
        """Ask, and do not wait for the answer."""
        os.write(self._asked, f"{question}\n".encode())

    def told(self, seconds: float = 60) -> str:
        """Return its next line; AssertionError when it does not come."""
        text, until = "", time.monotonic() + seconds
        while not text.endswith("\n"):
            ready, _, _ = select.select([self._answered], [], [], max(0, until - time.monotonic()))
            assert ready, f"{self.id} does not answer: {self.doings()}"
            text += os.read(self._answered, 4096).decode()
        return text.strip()

    def doings(self) -> dict[str, str]:
        """Return what keeps each thread of its processes, as the kernel says: state, tracer, system call."""
        found = {}
        for process in psutil.process_iter():
            if self.id not in cgroup_of(process.pid):
                continue
            for task in Path(f"/proc/{process.pid}/task").glob("*"):
                with suppress(OSError):
                    lines = (task / "status").read_text().splitlines()
                    kept = [one for one in lines if one.startswith(("Name:", "State:", "TracerPid:"))]
                    words = [one.partition(":")[2].strip() for one in kept]
                    found[task.name] = " ".join([*words, (task / "syscall").read_text().strip()])
        for state in Path("/sys/fs/cgroup").glob(f"freezer/**/{self.id}/freezer.state"):
            found["freezer"] = state.read_text().strip()
        return found

    def close(self) -> None:
        for fd in (self._asked, self._answered):
            os.close(fd)


def pipes(id: str) -> list[int]:
    """Open the pipes of a container, made where it sees them, so that neither end waits for the other one."""
    found = []
    for name in ("asked", "answered"):
        path = GPUS / f"{id}.{name}"
        os.mkfifo(path)
        path.chmod(0o666)  # a container's user is not root
        found.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    return found


@contextmanager
def holding(ctr: Ctr, pieces: int, flags: Sequence[str] = (), *, later: bool = False) -> Iterator[Holding]:
    """Run a container that holds so many pieces of GPU 0, each filled with another value.

    `later`: it does not begin with CUDA before it is asked for anything, and then says "ready".
    """
    id = ctr.new_id("gpu")
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    holding = Holding(id, pieces)
    begins = f"{'read begin;' if later else ''} exec python3 {INSIDE}/holds.py {pieces}"
    words = f"exec < {GPUS}/{id}.asked > {GPUS}/{id}.answered; {begins}"
    try:
        with own.running("sh", "-c", words, id=id, flags=[*mounts(), *visible(0), *flags]):
            if not later:
                assert holding.told() == "ready"
                for piece in range(pieces):
                    holding.fill(piece, piece + 1)
            yield holding
    finally:
        holding.close()
        for path in GPUS.glob(f"{id}.*"):
            path.unlink()


@contextmanager
def holding_again(ctr: Ctr, image: Path, holding: Holding, flags: Sequence[str] = ()) -> Iterator[None]:
    """Restore an image of `holding`, which is the new container then."""
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    holding.id = ctr.new_id("gpu")
    wanted = ["--annotation", f"kybernate.io/restore-from={image}", *mounts(), *visible(0), *flags]
    try:
        own.launch("false", id=holding.id, flags=wanted)
        yield
    finally:
        own.remove(holding.id)


def both() -> list[str]:
    """Return ctr's flags that give both GPUs to a container, after those that give it one."""
    return visible(0, 1)


def ask_shim(ctr: Ctr, id: str, method: str) -> Any:
    """Suspend or resume a container by its shim's own service."""
    kinds = {
        "Suspend": (shim_pb2.SuspendRequest, shim_pb2.SuspendResponse),
        "Resume": (shim_pb2.ResumeRequest, shim_pb2.ResumeResponse),
    }
    request, reply = kinds[method]

    async def call(client: Client) -> Any:
        return await client.call("kybernate.shim.v1.Shim", method, request(id=id), reply, timeout=30)

    return ask(ctr.namespace, id, call)


@contextmanager
def begun(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in parallel with the test; it is ended with the block."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
