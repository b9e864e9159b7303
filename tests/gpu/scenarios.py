"""What must hold on real GPUs, one function a scenario; each returns the rows of its measured steps."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kybernate_shim.cuda_helper.node_arena import IDLE_SECONDS
from tests import users
from tests.gpu.machine import IMAGE, Machine, mounts
from tests.gpu.nvidia import SHOWN, Toolkit, by_runtime

CHECKOUT = Path(__file__).resolve().parents[2]
PAYLOAD = Path(__file__).with_name("payload.py")
FOR_USERS = "/payload"
START_SECONDS = 120
GO_ON_SECONDS = 60
IDLE_MARGIN = 64 << 20  # bytes by which a GPU may differ from its idle figure
SAFE = ["--annotation", "kybernate.io/nccl-safe=true"]
GIVEN = "ls /dev/nvidia*; /sbin/ldconfig -p | grep -e libcuda.so -e libnvidia-ml.so"
LOOK = f"{GIVEN}; cat /proc/driver/nvidia/params || true"
ARENA = ["--annotation", "kybernate.io/arena=true"]

RUNTIME = "io.containerd.kybernate.v1"

Row = tuple[str, str, float, int]  # scenario, step, seconds, bytes


@dataclass
class Bench:
    """What scenarios work with: the node, how to start the payload, where images go, whether all have the arena.

    `toolkit`: NVIDIA's, where its runtime gives containers their GPUs. `out` is the folder of the run's results,
    `pretended` that of the pretended driver's programs.
    """

    machine: Machine
    images: Path
    payload: Callable[..., list[str]]
    flags: list[str]
    mib: int
    arena: bool = False
    toolkit: Toolkit | None = None
    out: Path = Path()
    pretended: Path | None = None
    rows: list[Row] = field(default_factory=list)

    def flags_of(self, flags: Sequence[str], name: str) -> list[str]:
        """Return ctr's flags for a container of that name: its view of the machine, and its GPUs."""
        if self.toolkit is None:
            return [*mounts(), *self.flags, *flags]
        return [*mounts(without=SHOWN), *self.toolkit.mounts(name), *by_runtime([*self.flags, *flags])]

    def kybernate(self, *argv: str, status: int | None = 0) -> str:
        return self.machine("kybernate", *argv, status=status)

    def checkpoint(self, name: str, id: str, image: Path, *flags: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(
            self.kybernate("checkpoint", id, str(image), "--no-rootfs", "--json", *flags)
        )
        manifest = json.loads((image / "kybernate-manifest.json").read_text())
        through = bool(manifest.get("arena"))
        assert through == self.arena, f"{'' if through else 'not '}through the arena: {manifest.get('data_path')}"
        self.note(name, answer["steps"])
        self.rows.append((name, "whole checkpoint", answer["seconds"], answer["bytes"]))
        return answer

    def note(self, name: str, steps: Sequence[dict[str, Any]]) -> None:
        self.rows.extend((name, step["name"], step["seconds"], step["bytes"]) for step in steps)

    def in_use(self) -> dict[str, int]:
        """Return the bytes in use on each GPU, as the driver counts them."""
        found = json.loads(self.kybernate("cuda", "gpus", "--json"))
        return {gpu["uuid"]: gpu["total_bytes"] - gpu["free_bytes"] for gpu in found}

    def await_idle(self, idle: dict[str, int]) -> None:
        """Wait until the GPUs are as they were, without the contexts that the helper's arena has of its own."""
        await_true(
            lambda: all(used <= idle[uuid] + IDLE_MARGIN for uuid, used in self.in_use().items()),
            "idle",
            seconds=IDLE_SECONDS + GO_ON_SECONDS,
        )


@dataclass
class Container:
    """A container that computes, by its log on the host."""

    bench: Bench
    id: str
    log: Path

    def steps(self) -> list[int]:
        """Return each program's last step; a step left out or a wrong figure fails."""
        last: dict[str, tuple[int, str]] = {}
        for line in self.log.read_text().split("\n")[:-1] if self.log.exists() else []:
            found = re.fullmatch(r"(?:(\d+): )?step (\d+) (?:sum|checksum) (\w+)", line)
            if found is None and not line.startswith(("wrong", "Traceback")):
                continue  # a library's own words
            assert found is not None, self.log.read_text()[-3000:]
            name, step, figure = found[1] or "", int(found[2]), found[3]
            if name in last:
                assert step == last[name][0] + 1, f"{line} follows {last[name]}"
                assert figure == last[name][1] or "checksum" in line, f"{line} follows {last[name]}"
            last[name] = step, figure
        return sorted(step for step, _ in last.values())

    def computes_on(self, programs: int = 1) -> None:
        before = self.steps() or [0] * programs
        await_true(
            lambda: (
                len(now := self.steps()) == programs
                and all(new > old + 3 for new, old in zip(now, before, strict=True))
            ),
            f"{self.id} computes on from {before}",
            seconds=GO_ON_SECONDS,
            shown=lambda: self.log.read_text()[-2000:] if self.log.exists() else "no output",
        )


def await_true(
    look: Callable[[], bool], what: str, *, seconds: float = 30, shown: Callable[[], str] = lambda: ""
) -> None:
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, f"not after {seconds:g} s: {what}\n{shown()}"
        time.sleep(0.1)


@contextmanager
def container(
    bench: Bench, name: str, *argv: str, programs: int = 1, flags: Sequence[str] = (), log: Path | None = None
) -> Iterator[Container]:
    """Run the payload, or `argv`, in a container of that name until it computes."""
    log = log or bench.images / f"{name}.log"
    ctr = [
        "ctr", "run", "-d", "--runtime", RUNTIME, "--log-uri", f"file://{log}",
        *bench.flags_of(flags, name), IMAGE, name, *argv,
    ]  # fmt: skip
    try:
        bench.machine(*ctr)
        one = Container(bench, name, log)
        await_true(
            lambda: len(one.steps()) == programs or _ended(bench, name),
            f"{name} computes",
            seconds=START_SECONDS,
            shown=lambda: log.read_text()[-2000:] if log.exists() else "no output",
        )
        assert not _ended(bench, name), f"{name} ended\n{log.read_text()[-2000:]}"
        yield one
    finally:
        bench.machine("ctr", "task", "kill", "-s", "SIGKILL", "-a", name, status=None)
        await_true(lambda: _removed(bench, name), f"{name} is removed")
        bench.machine("ctr", "container", "rm", name, status=None)


def _ended(bench: Bench, name: str) -> bool:
    return any(line.split()[0::2] == [name, "STOPPED"] for line in bench.machine("ctr", "task", "ls").splitlines())


def _removed(bench: Bench, name: str) -> bool:
    bench.machine("ctr", "task", "rm", "-f", name, status=None)
    return name not in bench.machine("ctr", "task", "ls")


@contextmanager
def restored(
    bench: Bench, name: str, image: Path, log: Path, *, programs: int = 1, flags: Sequence[str] = ()
) -> Iterator[Container]:
    """Restore an image into a new container, and note the seconds until it is running."""
    begin = time.monotonic()
    wanted = ["--annotation", f"kybernate.io/restore-from={image}", *flags]
    with container(bench, name, "/never/run", programs=programs, flags=wanted, log=log) as one:
        bench.rows.append((name, "start to computing", time.monotonic() - begin, 0))
        one.computes_on(programs)
        yield one


# -- one GPU ----------------------------------------------------------------------------------------------------------


def exit_and_restore(bench: Bench) -> None:
    """ctr's checkpoint and ours: the container is gone, the GPU idle, and a new container continues."""
    name, image = "exit-and-restore", bench.images / "exit"
    idle = bench.in_use()
    with container(bench, name, *bench.payload("one")) as one:
        checkpoint = bench.machine("ctr", "task", "checkpoint", name).strip()
        one.computes_on()
        bench.machine("ctr", "images", "rm", "--sync", checkpoint)
        bench.checkpoint(name, name, image, "--exit")
        bench.await_idle(idle)
    with restored(bench, f"{name}-2", image, one.log):
        pass
    shutil.rmtree(image)


def leave_running(bench: Bench) -> None:
    name, image = "leave-running", bench.images / "leave"
    with container(bench, name, *bench.payload("one")) as one:
        bench.checkpoint(name, name, image)
        one.computes_on()
    shutil.rmtree(image)


def suspend_and_resume(bench: Bench) -> None:
    name, idle = "suspend-resume", bench.in_use()
    with container(bench, name, *bench.payload("one")) as one:
        for _ in range(3):
            bench.note(name, json.loads(bench.kybernate("suspend", name, "--json"))["steps"])
            bench.await_idle(idle)
            bench.note(name, json.loads(bench.kybernate("resume", name, "--json"))["steps"])
            one.computes_on()


def parks(bench: Bench) -> None:
    """What is suspended goes to the disk and comes back, twice; nothing where there is no arena.

    The directory is one of the checkout's, for `tests/gpu/beside` has /var/lib/kybernate in memory.
    """
    if not bench.arena:
        return
    name, settings = "parks", Path("/etc/kybernate/shim.toml")
    with TemporaryDirectory(dir=CHECKOUT / "build") as place, container(bench, name, *bench.payload("one")) as one:
        before = settings.read_text()
        settings.write_text(f'parking_root = "{place}"\n{before}')
        for _ in range(2):
            bench.note(name, json.loads(bench.kybernate("suspend", name, "--json"))["steps"])
            began = time.monotonic()
            bench.kybernate("park", name)
            size = sum(path.stat().st_size for path in Path(place).rglob("*.bin"))
            bench.rows.append((name, "whole park", time.monotonic() - began, size))
            assert size, "nothing is on the disk"
            bench.note(name, json.loads(bench.kybernate("resume", name, "--json"))["steps"])
            one.computes_on()
            assert not any(Path(place).iterdir())
        settings.write_text(before)


def two_processes(bench: Bench) -> None:
    name, image = "two-processes", bench.images / "two"
    with container(bench, name, *bench.payload("two"), programs=2) as one:
        bench.checkpoint(name, name, image, "--exit")
    with restored(bench, f"{name}-2", image, one.log, programs=2):
        pass
    shutil.rmtree(image)


def two_of_a_pod(bench: Bench) -> None:
    """Two containers of a pod on one GPU: each leaves and comes back next to the other, and both at the same time."""
    pod, names = "pod", ("pod-one", "pod-two")
    kind = "io.kubernetes.cri.container-type"
    of_pod = ["--annotation", f"io.kubernetes.cri.sandbox-id={pod}", "--annotation"]
    idle = bench.in_use()
    sandbox = ["ctr", "run", "-d", "--runtime", RUNTIME, *mounts(), *of_pod, f"{kind}=sandbox", IMAGE, pod]
    bench.machine(*sandbox, "sleep", "infinity")
    try:
        with ExitStack() as stack:
            both = [
                stack.enter_context(container(bench, name, *bench.payload("one"), flags=[*of_pod, f"{kind}=container"]))
                for name in names
            ]
            for one, other in (both, reversed(both)):
                bench.note(one.id, json.loads(bench.kybernate("suspend", one.id, "--json"))["steps"])
                other.computes_on()
                bench.note(one.id, json.loads(bench.kybernate("resume", one.id, "--json"))["steps"])
                one.computes_on()
            for verb in ("suspend", "resume"):
                with ThreadPoolExecutor() as pool:
                    list(pool.map(partial(bench.kybernate, verb), names))
                if verb == "suspend":
                    bench.await_idle(idle)
            for one in both:
                one.computes_on()
                image = bench.images / one.id
                bench.checkpoint(one.id, one.id, image)
                shutil.rmtree(image)
                one.computes_on()
    finally:
        bench.machine("ctr", "task", "kill", "-s", "SIGKILL", pod, status=None)
        await_true(lambda: _removed(bench, pod), f"{pod} is removed")
        bench.machine("ctr", "container", "rm", pod, status=None)


SWITCHED, ACTIVE, SWITCHES = 6, 3, 24


def switches(bench: Bench) -> None:
    """Six programs, of which the GPU has room for three, change places at random. Only by its name: it needs memory."""
    numbers = random.Random(1)
    with ExitStack() as stack:
        active: list[Container] = []
        away: list[Container] = []
        for number in range(SWITCHED):
            one = stack.enter_context(container(bench, f"switched-{number}of", *bench.payload("one")))
            one.computes_on()
            if number < SWITCHED - ACTIVE:
                bench.kybernate("suspend", one.id)
                away.append(one)
            else:
                active.append(one)
        for _ in range(SWITCHES):
            out, back = active.pop(numbers.randrange(ACTIVE)), away.pop(numbers.randrange(len(away)))
            began = time.monotonic()
            answer = json.loads(bench.kybernate("swap", out.id, back.id, "--json"))
            took = time.monotonic() - began
            name = f"{out.id} to {back.id}"
            bench.note(name, answer["steps"])
            bench.rows.append((name, "whole command", took, 0))
            told = ", ".join(f"{step['name']} {step['seconds']:.2f}" for step in answer["steps"])
            print(f"  {name}: {took:.2f} s, {told}", flush=True)
            back.computes_on()
            active.append(back)
            away.append(out)


# -- by NVIDIA's runtime ----------------------------------------------------------------------------------------------


def driver_is_given(bench: Bench) -> None:
    """A container that asks for no GPU has nothing of the driver; one that does has it, after a restore as before.

    It comes first: hooks leave links and the loader's cache in the overlays.
    """
    name, image = "driver-is-given", bench.images / "given"
    assert bench.toolkit is not None
    shown = [*mounts(without=SHOWN), *bench.toolkit.mounts(f"{name}-without")]
    without = ["ctr", "run", "--rm", "--runtime", RUNTIME, *shown, IMAGE, f"{name}-without"]
    said = bench.machine(*without, "sh", "-c", f"echo found $({{ {GIVEN}; }} | wc -l)")
    assert "found 0" in said, said
    with container(bench, name, *bench.payload("one")) as one:
        seen = bench.machine("ctr", "task", "exec", "--exec-id", "look", name, "sh", "-c", LOOK)
        assert "libcuda.so.1" in seen, seen
        assert "ModifyDeviceFiles: 1" not in seen, seen  # as it is on the machine
        bench.checkpoint(name, name, image, "--exit")
    with restored(bench, f"{name}-2", image, one.log):
        again = bench.machine("ctr", "task", "exec", "--exec-id", "look", f"{name}-2", "sh", "-c", LOOK)
        assert again == seen, f"{seen}\nbefore, and after the restore\n{again}"
    shutil.rmtree(image)


# What a program can make of itself by a shell, and all that is compared afterwards.
CHANGES = ("sh", "-c", 'umask 0027; ulimit -S -n 900; exec nice -n 7 "$@"', "sh")
IDENTITY = (
    *("Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"),
    *("Seccomp_filters", "SigBlk", "SigIgn", "SigCgt"),
)


def as_user(bench: Bench) -> None:
    """A program of uid 1000 without capabilities: in place, left running, and from an image."""
    name, image, idle = "as-user", bench.images / "user", bench.in_use()
    seen = ["--mount", f"type=bind,src={PAYLOAD.parent},dst={FOR_USERS},options=rbind:ro"]  # wherever the checkout is
    flags = [*users.flags(), "--seccomp", *seen]
    argv = [*CHANGES, *(word.replace(str(PAYLOAD.parent), FOR_USERS) for word in bench.payload("one"))]
    with container(bench, name, *argv, flags=flags) as one:
        before = identity_of(bench, name)
        require_user(before)
        bench.note(name, json.loads(bench.kybernate("suspend", name, "--json"))["steps"])
        bench.await_idle(idle)
        bench.note(name, json.loads(bench.kybernate("resume", name, "--json"))["steps"])
        one.computes_on()
        bench.checkpoint(name, name, image)
        one.computes_on()
        assert identity_of(bench, name) == before
        shutil.rmtree(image)
        bench.checkpoint(name, name, image, "--exit")
        bench.await_idle(idle)
    with restored(bench, f"{name}-2", image, one.log, flags=flags) as again:
        assert identity_of(bench, again.id) == before
        bench.note(name, json.loads(bench.kybernate("suspend", again.id, "--json"))["steps"])
        bench.note(name, json.loads(bench.kybernate("resume", again.id, "--json"))["steps"])
        again.computes_on()
    shutil.rmtree(image)


def identity_of(bench: Bench, name: str) -> dict[str, str]:
    """Return what the kernel knows of a container's first process that CRIU has to bring back."""
    (pid,) = (
        line.split()[1] for line in bench.machine("ctr", "task", "ls").splitlines() if line.startswith(f"{name} ")
    )
    process = Path("/proc", pid)
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    files = {kind: (process / kind).read_text() for kind in ("limits", "oom_score_adj", "coredump_filter")}
    nice = (process / "stat").read_text().rpartition(")")[2].split()[16]
    return {**{kind: status[kind] for kind in IDENTITY}, **files, "nice": nice}


def require_user(found: dict[str, str]) -> None:
    """Fail unless a process is the user's, without capabilities, and is what `CHANGES` has made of it."""
    assert found["Uid"].split() == [str(users.UID)] * 4, found["Uid"]
    assert {int(found[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}, found
    assert (found["Umask"], found["nice"], found["NoNewPrivs"], found["Seccomp"]) == ("0027", "7", "1", "2"), found
    assert re.search(r"^Max open files +900 ", found["limits"], re.MULTILINE), found["limits"]


# -- two GPUs ---------------------------------------------------------------------------------------------------------


def move(bench: Bench) -> None:
    """From GPU 0 to GPU 1 after the dump, by the devices of the new container."""
    name, image = "move", bench.images / "move"
    before = list(bench.in_use().values())
    with container(bench, name, *bench.payload("one")) as one:
        bench.checkpoint(name, name, image, "--exit")
    bench.flags = [flag.replace("/dev/nvidia0", "/dev/nvidia1") for flag in bench.flags]
    try:
        with restored(bench, f"{name}-2", image, one.log):
            used = list(bench.in_use().values())
            assert used[1] > before[1] + IDLE_MARGIN, f"GPU 1 holds {used[1]} bytes, and held {before[1]}"
    finally:
        bench.flags = [flag.replace("/dev/nvidia1", "/dev/nvidia0") for flag in bench.flags]
        shutil.rmtree(image)


# Few channels: the /dev/shm that a container has by default, 64 MiB, is too small for NCCL's 9 MiB for each.
RANKS = ["--device", "/dev/nvidia1", "--cap-add", "CAP_NET_ADMIN", "--env", "USE_LIBUV=0"]
RANKS += ["--env", "NCCL_MAX_NCHANNELS=2"]


def nccl_refused(bench: Bench) -> None:
    """Two ranks as they are: refused, and they continue."""
    name = "nccl-refused"
    with container(bench, name, *bench.payload("ranks"), programs=2, flags=RANKS) as one:
        said = bench.kybernate("checkpoint", name, str(bench.images / name), "--no-rootfs", status=4)
        assert "NCCL" in said, said
        one.computes_on(2)


def nccl_restored(bench: Bench) -> None:
    """Two ranks with the environment that is safe. Needs CRIU 4.2 where Linux is 6.16 or newer."""
    name, image = "nccl", bench.images / "nccl"
    with container(bench, name, *bench.payload("ranks"), programs=2, flags=[*RANKS, *SAFE]) as one:
        bench.checkpoint(name, one.id, image, "--exit", "--tcp", "established")  # the ranks' own, through lo
    with restored(bench, f"{name}-2", image, one.log, programs=2, flags=[*RANKS, *SAFE]):
        pass
    shutil.rmtree(image)


ONE_GPU = (exit_and_restore, leave_running, suspend_and_resume, parks, two_processes, two_of_a_pod, as_user)
BY_NVIDIA = (driver_is_given,)
TWO_GPUS = (move, nccl_refused, nccl_restored)
