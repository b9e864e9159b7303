"""Containers that compute on the pretended cards, and the node's side of it: the driver, the cards, the helper."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kybernate_shim.cuda import pages
from kybernate_shim.cuda.arena.kernel import machine_code
from kybernate_shim.cuda.arena.memory import FOLDER, Memory
from kybernate_shim.messages import shim_pb2
from kybernate_shim.ttrpc import Client
from tests.fakes.cuda import Cards, build
from tests.stillness import come_to_rest
from tests.system.checkpoints import PYTHON, ask, kybernate
from tests.system.ctr import BUNDLES, Ctr, eventually

LIBRARIES = Path("/usr/local/lib/fake-cuda")  # on the node, found through ldconfig as a driver's are
LOADER = Path("/etc/ld.so.conf.d/fake-cuda.conf")
CARDS = Path("/run/fake-cuda")  # where the driver looks without being told
SOCKET = Path("/run/kybernate/cuda.sock")
CONFIG = Path("/etc/kybernate/shim.toml")
CAPABILITY = 9, 0  # of a pretended card
INSIDE = "/opt/cuda"
COMPUTES = f"{INSIDE}/computes"
# Stands in for NVIDIA's runtime: at `create`, and only then, it edits the bundle as NVIDIA_VISIBLE_DEVICES says.
RUNTIME = Path("/usr/local/bin/nvidia-container-runtime")
RUNTIME_SOURCE = f"""#!/opt/kybernate/bin/python
import json, os, sys
arguments = sys.argv[1:]
if "create" in arguments:
    path = os.path.join(arguments[arguments.index("--bundle") + 1], "config.json")
    spec = json.load(open(path))
    visible = [value[23:] for value in spec["process"]["env"] if value.startswith("NVIDIA_VISIBLE_DEVICES=")]
    if visible and not any(mount["destination"] == "{INSIDE}" for mount in spec["mounts"]):
        mount = {{"destination": "{INSIDE}", "type": "bind", "source": "{LIBRARIES}", "options": ["rbind", "ro"]}}
        spec["mounts"].append(mount)
        for index in visible[0].split(","):
            device = {{"path": f"/dev/nvidia{{index}}", "type": "c", "major": 1, "minor": 3, "fileMode": 438}}
            spec["linux"].setdefault("devices", []).append(device)
        json.dump(spec, open(path, "w"))
os.execvp("runc", ["runc", *arguments])
"""
SMALL = ["2", "20"]  # MiB, and milliseconds between two steps


def install_driver() -> Cards:
    """Make this node one with two cards: the driver in the loader's path, and device nodes to name the cards by."""
    built = build()
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "computes", "computes.py", "holds.py", "forks.py"):
        source = built / name if (built / name).exists() else Path(__file__).parents[1] / "fakes/cuda" / name
        shutil.copy(source, LIBRARIES)
    subprocess.run(["gcc", "-shared", "-o", LIBRARIES / "libnccl.so.2", "-x", "c", os.devnull], check=True)
    LOADER.write_text(f"{LIBRARIES}\n")
    subprocess.run(["ldconfig"], check=True)
    RUNTIME.write_text(RUNTIME_SOURCE)
    RUNTIME.chmod(0o755)
    for index in range(2):
        node = Path(f"/dev/nvidia{index}")
        node.touch()
        subprocess.run(["mount", "--bind", "/dev/null", node], check=True)
    with pages.node_wide():
        pass  # its files stay, as on a node that has moved VRAM before
    return Cards.create(CARDS, size=512 << 20)


def remove_driver() -> None:
    """Make it a node without cards again."""
    LOADER.unlink()
    subprocess.run(["ldconfig"], check=True)
    for index in range(2):
        subprocess.run(["umount", f"/dev/nvidia{index}"], check=True)
        Path(f"/dev/nvidia{index}").unlink()
    RUNTIME.unlink()
    for directory in (LIBRARIES, CARDS, pages.STATE):
        shutil.rmtree(directory)


@contextmanager
def node_with_arena(size: int, more: str = "") -> Iterator[Cards]:
    """Have a node with two cards and an arena, whose helper runs already; `more` goes into the `[gpu]` table."""
    cards = install_driver()
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text(f'[gpu]\narena = {{ 0 = "{size >> 20}MiB" }}\n{more}')
    forget_helper()
    Memory(((0, size),)).prepare()
    machine_code(FOLDER, *CAPABILITY)
    assert Memory(size).free() == size
    kybernate("cuda", "state", "--pid", str(os.getpid()))
    yield cards
    forget_helper()
    CONFIG.unlink()
    if FOLDER.is_mount():
        subprocess.run(["umount", FOLDER], check=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    remove_driver()


def helpers() -> list[psutil.Process]:
    """Return the node's CUDA helper, or nothing."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if "kybernate_shim.cuda.helper" in (process.info["cmdline"] or [])]


def kill_helpers() -> None:
    for helper in helpers():
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            family = [*helper.children(recursive=True), helper]
            for process in family:
                with suppress(psutil.NoSuchProcess):  # as its workers do at any time
                    process.kill()
            eventually(lambda: not any(map(lives, family)))  # noqa: B023  # asked at once


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cgroup_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def forget_helper() -> None:
    """End the helper and remove what it and its callers have left in /run/kybernate."""
    kill_helpers()
    for path in SOCKET.parent.glob("cuda*"):
        path.unlink()
    shutil.rmtree(SOCKET.parent / "claims", ignore_errors=True)


def mounts() -> list[str]:
    """Return ctr's flags for a container on this node: the driver's libraries and the cards' accounts."""
    return [
        "--mount", f"type=bind,src={LIBRARIES},dst={INSIDE},options=rbind:ro",
        "--mount", f"type=bind,src={CARDS},dst={CARDS},options=rbind:rw",
        "--env", f"LD_LIBRARY_PATH={INSIDE}",
    ]  # fmt: skip


@dataclass
class Computing:
    """A container with programs that check every word of their memory on the card, and print a line a step."""

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
        """Every program goes on, with the right numbers and none left out."""
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
    ctr: Ctr, *argv: str, programs: int = 1, flags: Sequence[str] = (), log: Path | None = None
) -> Iterator[Computing]:
    """Run a container that computes on card 0, and has begun to; a `log` that is given stays."""
    id = ctr.new_id("gpu")
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    given, log = log, log or Path(f"/tmp/{id}.out")
    wanted = ["--log-uri", f"file://{log}", *mounts(), "--device", "/dev/nvidia0", *flags]
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
    device: str = "/dev/nvidia0",
    flags: Sequence[str] = (),
) -> Iterator[Computing]:
    """Restore an image into a new container, whose own command must not run."""
    id = ctr.new_id("gpu")
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    wanted = ["--log-uri", f"file://{log}", "--annotation", f"kybernate.io/restore-from={image}"]
    try:
        own.launch("false", id=id, flags=[*wanted, *mounts(), "--device", device, *flags])
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
        self._ask(f"fill {piece} {value}")

    def share(self) -> None:
        """Import memory, as from another process."""
        self._ask("share")

    def unshare(self) -> None:
        self._ask("unshare")

    def is_right(self) -> bool:
        """Tell whether the card's memory is what it was filled with."""
        return self._ask("content") == " ".join(map(str, self._content))

    def _ask(self, question: str) -> str:
        os.write(self._asked, f"{question}\n".encode())
        return self.told()

    def told(self, seconds: float = 20) -> str:
        """Return its next line; AssertionError when it does not come."""
        text, until = "", time.monotonic() + seconds
        while not text.endswith("\n"):
            ready, _, _ = select.select([self._answered], [], [], max(0, until - time.monotonic()))
            assert ready, f"{self.id} does not answer"
            text += os.read(self._answered, 4096).decode()
        return text.strip()

    def close(self) -> None:
        for fd in (self._asked, self._answered):
            os.close(fd)


def pipes(id: str) -> list[int]:
    """Open the pipes of a container, made where it sees them, so that neither end waits for the other one."""
    found = []
    for name in ("asked", "answered"):
        path = CARDS / f"{id}.{name}"
        os.mkfifo(path)
        found.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    return found


@contextmanager
def holding(ctr: Ctr, pieces: int, flags: Sequence[str] = ()) -> Iterator[Holding]:
    """Run a container that holds so many pieces of card 0, each filled with another value."""
    id = ctr.new_id("gpu")
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    holding = Holding(id, pieces)
    words = f"exec python3 {INSIDE}/holds.py {pieces} < {CARDS}/{id}.asked > {CARDS}/{id}.answered"
    try:
        with own.running("sh", "-c", words, id=id, flags=[*mounts(), "--device", "/dev/nvidia0", *flags]):
            assert holding.told() == "ready"
            for piece in range(pieces):
                holding.fill(piece, piece + 1)
            yield holding
    finally:
        holding.close()
        for path in CARDS.glob(f"{id}.*"):
            path.unlink()


@contextmanager
def holding_again(ctr: Ctr, image: Path, holding: Holding, flags: Sequence[str] = ()) -> Iterator[None]:
    """Restore an image of `holding`, which is the new container then."""
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    holding.id = ctr.new_id("gpu")
    wanted = ["--annotation", f"kybernate.io/restore-from={image}", *mounts(), "--device", "/dev/nvidia0", *flags]
    try:
        own.launch("false", id=holding.id, flags=wanted)
        yield
    finally:
        own.remove(holding.id)


def both() -> list[str]:
    """Return ctr's flag that adds the second card to a container."""
    return ["--device", "/dev/nvidia1"]


def heal(cards: Cards) -> None:
    """Take back everything that a test has switched."""
    cards.switch("")
    cards.slow(0)
    cards.missing()
    for name in ("mig", "driver", "hidden"):
        (cards.directory / name).unlink(missing_ok=True)
    shutil.rmtree(SOCKET.parent / "claims", ignore_errors=True)


def noted_as_locked(pid: int) -> bool:
    """Tell whether the bundle of some container says that this process may be locked."""
    return any(str(pid) in path.read_text() for path in BUNDLES.glob("*/*/kybernate.json"))


@contextmanager
def other_model(cards: Cards) -> Iterator[None]:
    """Let the machine have other cards for a while."""
    file = cards.directory / "cards"
    before = file.read_text()
    file.write_text(before.replace("H200", "B200"))
    try:
        yield
    finally:
        file.write_text(before)


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
    """Run a command beside the test; it is ended with the block."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
