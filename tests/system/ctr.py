"""containerd's `ctr` as a driver: one method a command, real processes, errors with both outputs."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.system import identity, warm

BUNDLES = Path("/run/containerd/io.containerd.runtime.v2.task")
BUSYBOX = "localhost:5000/busybox:latest"
STOCK = "io.containerd.runc.v2"
KYBERNATE = "io.containerd.kybernate.v1"

T = TypeVar("T")
_numbers = itertools.count(1)


class CommandFailed(AssertionError):
    """A command ended with another status than expected; shows argv and both outputs."""


def run(argv: Sequence[str], *, stdin: bytes | None = None, status: int | None = 0, timeout: float = 60) -> str:
    """Run `argv` and return its stdout; any status is fine where `status` is None."""
    done = finished(argv, stdin=stdin, timeout=timeout)
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if status is not None and done.returncode != status:
        said = f"{out[-4000:]}\n{err[-4000:]}"
        raise CommandFailed(f"{' '.join(argv)}\nended with {done.returncode}, not {status}\n{said}")
    return out


def finished(
    argv: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[bytes]:
    """Run `argv` to its end, with `stdin` or /dev/null."""
    if warm.can_run(argv):
        return warm.run(argv, stdin=stdin or b"", timeout=timeout)
    source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(argv, capture_output=True, timeout=timeout, check=False, **source)


def eventually(look: Callable[[], T], *, seconds: float = 20, pause: float = 0.05) -> T:
    """Return the first true answer of `look`; fail with its last answer or error after `seconds`."""
    end, last = time.monotonic() + seconds, "nothing"
    while True:
        try:
            answer = look()
            if answer:
                return answer
            last = repr(answer)
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            last = str(error)
        if time.monotonic() > end:
            raise AssertionError(f"not true after {seconds:g} s: {getattr(look, '__name__', look)}; last: {last}")
        time.sleep(pause)


@functools.cache
def containerd_version() -> tuple[int, int]:
    """Return the major and the minor version of the node's containerd."""
    major, minor = run(["containerd", "--version"]).split()[2].removeprefix("v").split(".")[:2]
    return int(major), int(minor)


def _node_flags() -> list[str]:
    """Return what `ctr run` needs on a node whose cgroups limit nothing: no default share of the CPU."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers")
    return ["--cpu-shares", "0"] if unified.exists() and "cpu" not in unified.read_text().split() else []


def catches(pid: int, number: int) -> bool:
    """Tell whether a process handles a signal yet, which a container's first process does not even notice before."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:\t")[2].split()[0], 16) >> (number - 1) & 1)


@dataclass
class Ctr:
    """`ctr` for containers under one runtime, in one containerd namespace."""

    runtime: str = KYBERNATE
    namespace: str = "default"
    image: str = BUSYBOX
    run_flags: list[str] = field(default_factory=list)

    def __call__(self, *args: str, **options: Any) -> str:
        return run(["ctr", "-n", self.namespace, *args], **options)

    def new_id(self, kind: str = "c") -> str:
        return f"{kind}{os.getpid()}-{next(_numbers)}"

    def run_argv(self, id: str, *command: str, flags: Sequence[str] = ()) -> list[str]:
        flags = [*self.run_flags, *flags]
        return [
            "ctr", "-n", self.namespace, "run", "--runtime", self.runtime, *_node_flags(), *identity.flags(flags),
            *flags, self.image, id, *command,
        ]  # fmt: skip

    def run(self, *command: str, flags: Sequence[str] = (), **options: Any) -> str:
        """Run a container to its end and return what it printed."""
        return run(self.run_argv(self.new_id(), *command, flags=["--rm", *flags]), **options)

    def launch(self, *command: str, flags: Sequence[str] = (), id: str = "") -> str:
        """Start a container in the background, for good, and return its id."""
        id = id or self.new_id()
        run(self.run_argv(id, *command, flags=["-d", *flags]))
        return id

    @contextmanager
    def running(self, *command: str, flags: Sequence[str] = (), id: str = "") -> Iterator[str]:
        """Start a container in the background and remove it afterwards, whatever state it is in."""
        id = self.launch(*command, flags=flags, id=id)
        try:
            yield id
        finally:
            self.remove(id)

    def remove(self, id: str) -> None:
        """Kill and delete a container; gone is fine."""
        self("task", "kill", "-s", "SIGKILL", "-a", id, status=None)
        eventually(lambda: self._deleted(id))
        self("container", "rm", id, status=None)

    def _deleted(self, id: str) -> bool:
        if self.status(id) in ("PAUSED", "RUNNING"):
            self("task", "resume", id, status=None)
            self("task", "kill", "-s", "SIGKILL", "-a", id, status=None)
        self("task", "rm", "-f", id, status=None)
        return self.status(id) == ""

    def tasks(self) -> dict[str, tuple[int, str]]:
        """Return pid and status of every task, as `ctr task ls` shows them."""
        rows = [line.split() for line in self("task", "ls").splitlines()[1:]]
        return {row[0]: (int(row[1]), row[2]) for row in rows if len(row) >= 3}

    def status(self, id: str) -> str:
        return self.tasks().get(id, (0, ""))[1]

    def pid(self, id: str) -> int:
        return self.tasks()[id][0]

    def exec_argv(self, id: str, *command: str, exec_id: str = "", flags: Sequence[str] = ()) -> list[str]:
        exec_id = exec_id or self.new_id("e")
        return ["ctr", "-n", self.namespace, "task", "exec", "--exec-id", exec_id, *flags, id, *command]

    def exec(self, id: str, *command: str, flags: Sequence[str] = (), **options: Any) -> str:
        """Run a command in a container to its end and return what it printed."""
        return run(self.exec_argv(id, *command, flags=flags), **options)

    def metrics(self, id: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self("task", "metrics", "--format", "json", id))
        return answer


class Events:
    """containerd's event stream of a namespace from now on, one parsed line an event."""

    def __init__(self, namespace: str = "default") -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self._process = subprocess.Popen(
            ["ctr", "-n", namespace, "events"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._await_subscription(namespace)

    def _await_subscription(self, namespace: str) -> None:
        """An event of our own that comes back proves that the subscription stands."""

        def heard() -> bool:
            run(["ctr", "-n", namespace, "namespace", "label", namespace, f"probe={time.monotonic_ns()}"])
            return any(topic == "/namespaces/update" for topic, _ in self.seen)

        eventually(heard, pause=0.1)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            topic = next((word for word in line.split() if word.startswith("/")), "")
            begin = line.find("{")
            self.seen.append((topic, json.loads(line[begin:]) if begin >= 0 else {}))

    def of(self, id: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the task events of one container, in order."""
        return [
            (topic, event) for topic, event in list(self.seen)
            if topic.startswith("/tasks/") and event.get("container_id") == id
        ]  # fmt: skip

    def topics(self, id: str) -> list[str]:
        return [topic.removeprefix("/tasks/") for topic, _ in self.of(id)]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(10)
        self._thread.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
