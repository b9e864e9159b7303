"""What the OCI runtime tests share: they play the daemon, with a real runtime, real containers and a busybox rootfs.

After each test the container must be gone, and with it its cgroups and the runtime's state.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.config import Deadlines
from kybernate_shim.linux.children import Children, Exit, Finished
from kybernate_shim.linux.prctl import PR_SET_CHILD_SUBREAPER, become_subreaper, prctl
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.runtime import Runtime, RuntimeRunner

DEADLINE = 20.0
NAMESPACE = "contract"
RUNTIMES = ("runc", "crun")
APPLETS = ("sh", "sleep", "cat", "true", "readlink")
HYBRID = Path("/sys/fs/cgroup/unified/cgroup.controllers")
FOREVER = ("sleep", "1000")
VERBS = ("create", "start", "pause", "resume", "delete")  # of the runtime


@dataclass
class Bench:
    """One container-to-be and its daemon. `exits` resolves for every pid that a container or an exec got."""

    id: str
    bundle: Bundle
    runtime: Runtime
    children: Children
    exits: dict[int, asyncio.Future[Exit]]

    async def create(self, *args: str, fds: Mapping[int, int] | None = None, **spec: Any) -> int:
        """Create the container with `args` as its process, and return init's pid."""
        self.write_spec(*args, **spec)
        await self.runtime.create(self.id, self.bundle, fds=fds or {})
        return self.watch(self.bundle.init_pid())

    async def run(self, *args: str, fds: Mapping[int, int] | None = None, **spec: Any) -> int:
        pid = await self.create(*args, fds=fds, **spec)
        await self.runtime.start(self.id)
        return pid

    async def exec(self, exec_id: str, *args: str, fds: Mapping[int, int] | None = None) -> int:
        self.bundle.write_process(exec_id, json.dumps(_process(args)).encode(), terminal=False)
        with self.children.early_exits() as early:
            await self.runtime.exec(self.id, self.bundle, exec_id, fds=fds or {})
            pid = self.watch(self.bundle.exec_pid(exec_id))
            if exit_ := early.take(pid):
                self.exits[pid].set_result(exit_)
        return pid

    def watch(self, pid: int) -> int:
        self.exits[pid] = asyncio.get_running_loop().create_future()
        self.children.claim(pid, self.exits[pid].set_result)
        return pid

    async def status_of(self, pid: int) -> int:
        """Wait for the end of a process and return its exit status."""
        return (await asyncio.wait_for(self.exits[pid], DEADLINE)).status

    async def state(self) -> dict[str, Any]:
        """Return the runtime's state object, `status` and `pid` among its keys."""
        return dict(await self._answer("state"))

    async def pids(self) -> list[int]:
        """Return the pids, on the host, of all processes in the container's cgroup."""
        return list(await self._answer("ps", "--format", "json") or ())

    async def _answer(self, *words: str) -> Any:
        cli = self.runtime.cli
        argv = [str(cli.binary), "--root", str(cli.root), *words, self.id]
        finished = await self.children.run(argv, timeout=DEADLINE)
        assert finished.status == 0, finished.stderr
        return json.loads(finished.stdout)

    async def processes(self, count: int) -> list[int]:
        """Wait until the container has `count` processes, and return their pids."""
        pids: list[int] = []

        async def counted() -> bool:
            pids[:] = await self.pids()
            return len(pids) == count

        await until(counted, f"{count} processes")
        return pids

    async def until_state(self, status: str) -> None:
        """Wait until the runtime calls the container `status`; it may lag behind the exit that we reaped."""

        async def reached() -> bool:
            return bool((await self.state())["status"] == status)

        await until(reached, f"the container is {status}")

    def write_spec(self, *args: str, terminal: bool = False, own_pids: bool = True) -> None:
        kinds = ["ipc", "uts", "mount", "network", *(["pid"] if own_pids else [])]
        document = {
            "ociVersion": "1.0.2",
            "process": {**_process(args), "terminal": terminal},
            "root": {"path": "rootfs"},
            "hostname": "contract",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                {
                    "destination": "/dev/pts",
                    "type": "devpts",
                    "source": "devpts",
                    "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
                },
            ],
            "linux": {
                "cgroupsPath": f"/{self.id}",
                "resources": {"pids": {"limit": 100}},
                "namespaces": [{"type": kind} for kind in kinds],
            },
        }
        (self.bundle.path / "config.json").write_text(json.dumps(document))


def _process(args: tuple[str, ...]) -> dict[str, Any]:
    return {"user": {"uid": 0, "gid": 0}, "args": list(args), "cwd": "/", "env": ["PATH=/bin"]}


@dataclass
class Noting:
    """A runner that keeps the verbs of what it runs."""

    runner: RuntimeRunner
    verbs: list[str] = field(default_factory=list)

    async def run(self, argv: Any, **options: Any) -> Finished:
        self.verbs.append(next(word for word in argv if word in VERBS))
        return await self.runner.run(argv, **options)


Run = Callable[[Callable[[Bench], Awaitable[None]]], None]


@pytest.fixture(name="bench", params=RUNTIMES)
def fixture_bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """Run an async test with a fresh Bench on each runtime, and look for leftovers afterwards."""
    container = f"contract-{uuid.uuid4().hex[:12]}"
    binary = find_runtime(request.param, tmp_path)
    rootfs = tmp_path / "bundle/rootfs"
    _fill(rootfs)
    root = tmp_path / "state" / NAMESPACE
    bundle = Bundle(rootfs.parent)
    ran = []

    def run(work: Callable[[Bench], Awaitable[None]]) -> None:
        ran.append(work)
        asyncio.run(_with_bench(work, container, bundle, Cli(binary, root, bundle.log)))

    become_subreaper()
    try:
        yield run
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)  # orphans of later tests are not for this process, which would not reap them
    assert ran, "the test never ran its bench"
    assert not (root / container).exists(), "the runtime still knows the container"
    assert cgroups_of(container) == [], "cgroups are left"


async def _with_bench(work: Callable[[Bench], Awaitable[None]], container: str, bundle: Bundle, cli: Cli) -> None:
    async with daemon() as children:
        runtime = Runtime(cli, children, os.environ, Deadlines())
        bench = Bench(container, bundle, runtime, children, {})
        try:
            await asyncio.wait_for(work(bench), 3 * DEADLINE)
        finally:
            await runtime.delete(container, force=True)


@asynccontextmanager
async def daemon() -> AsyncIterator[Children]:
    children = Children()
    children.attach(asyncio.get_running_loop())
    yield children


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not await condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE:g} s: {what}"
        await asyncio.sleep(0.01)


async def until_ended(*pids: int) -> None:
    async def ended() -> bool:
        return not any(map(alive, pids))

    await until(ended, f"the end of {pids}")


def find_runtime(name: str, directory: Path) -> Path:
    """Return the path of a runtime that works on this machine.

    Older crun refuses a machine that has controllers in v1 and in v2; there it runs behind a program of the same name
    that hides v2 from it.
    """
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed"
    if name != "crun" or not HYBRID.exists() or not HYBRID.read_text().strip():
        return Path(found)
    inner = f'umount {HYBRID.parent} && exec {found} "$@"'
    return write_program(directory / "bin" / name, f"exec unshare --mount sh -c '{inner}' {name} \"$@\"")


def write_program(path: Path, script: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def _fill(rootfs: Path) -> None:
    busybox = shutil.which("busybox")
    assert busybox is not None, "busybox-static is not installed"
    for name in ("bin", "proc", "dev"):
        (rootfs / name).mkdir(parents=True)
    shutil.copy(busybox, rootfs / "bin/busybox")
    for applet in APPLETS:
        (rootfs / "bin" / applet).symlink_to("busybox")


def cgroups_of(container: str) -> list[Path]:
    return [Path(path) for path, _, _ in os.walk("/sys/fs/cgroup") if Path(path).name == container]


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for fd in ends:
            try:
                os.close(fd)
            except OSError:
                pass  # the test closed it


def read_all(ends: tuple[int, int]) -> str:
    """Close our write end and return all that was written before the last other one closed."""
    os.close(ends[1])
    with os.fdopen(os.dup(ends[0])) as stream:
        return stream.read()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
