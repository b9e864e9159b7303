"""The node's side of pretended GPUs: the driver, the GPUs, the CUDA helper, the arena."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from kybernate_shim.arena.memory import FOLDER, Memory
from kybernate_shim.cuda_worker.kernel import machine_code
from kybernate_shim.linux import huge_pages
from tests.fakes.cuda import Gpus, build
from tests.system.checkpoints import kybernate
from tests.system.ctr import BUNDLES, eventually
from tests.system.gpu import toolkit

PROGRAMS = Path("/usr/local/lib/fake-cuda")  # on the node
GPUS = Path("/run/fake-cuda")  # where the driver looks without being told
SOCKET = Path("/run/kybernate/cuda.sock")
CONFIG = Path("/etc/kybernate/shim.toml")
CAPABILITY = 9, 0  # of a pretended GPU
INSIDE = "/opt/cuda"  # where a container has the programs
COMPUTES = f"{INSIDE}/computes"
NAMES = ("computes", "computes.py", "holds.py", "forks.py", "epochs.py", "evades.py")


def install_driver() -> Gpus:
    """Make this node one with two GPUs, their driver, NVIDIA's container toolkit, and programs for containers."""
    built = build()
    toolkit.install(built)
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        shutil.copy(
            built / name if (built / name).exists() else Path(__file__).parents[2] / "fakes/cuda" / name, PROGRAMS
        )
    subprocess.run(["gcc", "-shared", "-o", PROGRAMS / "libnccl.so.2", "-x", "c", os.devnull], check=True)
    with huge_pages.node_wide():
        pass  # its files stay, as on a node that has moved VRAM before
    gpus = Gpus.create(GPUS, count=toolkit.GPUS, size=512 << 20)
    toolkit.specify()
    return gpus


def remove_driver() -> None:
    """Make it a node without GPUs again."""
    toolkit.remove()
    for directory in (PROGRAMS, GPUS, huge_pages.STATE):
        shutil.rmtree(directory)


@contextmanager
def node_with_arena(size: int, more: str = "") -> Iterator[Gpus]:
    """Have a node with two GPUs and an arena, whose helper runs already; `more` goes into the `[gpu]` table."""
    gpus = install_driver()
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text(f'[gpu]\narena = {{ 0 = "{size >> 20}MiB" }}\n{more}')
    forget_helper()
    Memory(((0, size),)).prepare()
    machine_code(FOLDER, *CAPABILITY)
    assert Memory(size).free() == size
    kybernate("cuda", "state", "--pid", str(os.getpid()))
    yield gpus
    forget_helper()
    CONFIG.unlink()
    if FOLDER.is_mount():
        subprocess.run(["umount", FOLDER], check=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    remove_driver()


def helpers() -> list[psutil.Process]:
    """Return the node's CUDA helper, or nothing."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if "kybernate_shim.cuda_helper.helper" in (process.info["cmdline"] or [])]


def kill_helpers() -> None:
    for helper in helpers():
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            family = [*helper.children(recursive=True), helper]
            for process in family:
                with suppress(psutil.NoSuchProcess):  # as its workers do at any time
                    process.kill()
            eventually(lambda: not any(map(lives, family)))  # noqa: B023  # asked immediately


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def forget_helper() -> None:
    """End the helper and remove what it and its callers have left in /run/kybernate."""
    kill_helpers()
    for path in SOCKET.parent.glob("cuda*"):
        path.unlink()
    shutil.rmtree(SOCKET.parent / "claims", ignore_errors=True)


def heal(gpus: Gpus) -> None:
    """Take back everything that a test has switched."""
    gpus.switch("")
    gpus.slow(0)
    gpus.missing()
    for name in ("mig", "driver", "hidden", "load", "limits"):
        (gpus.directory / name).unlink(missing_ok=True)
    shutil.rmtree(SOCKET.parent / "claims", ignore_errors=True)


def noted_as_locked(pid: int) -> bool:
    """Tell whether the bundle of some container says that this process may be locked."""
    return any(
        pid in json.loads(path.read_text()).get("locked_pids", ()) for path in BUNDLES.glob("*/*/kybernate.json")
    )


def open_files(pid: int) -> list[str]:
    """Return what a process has open, but for sockets, and what the pretended driver opens for a moment, or again."""
    names = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # one that it has closed
            names.append(str(fd.readlink()))
    drivers = {folder for name in names for folder, held, _ in [name.partition("/held/")] if held}
    return sorted(
        name
        for name in names
        if "/held/" not in name and str(Path(name).parent) not in drivers and not name.startswith("socket:")
    )


@contextmanager
def other_model(gpus: Gpus) -> Iterator[None]:
    """Let the machine have other GPUs for a while."""
    file = gpus.directory / "gpus"
    before = file.read_text()
    file.write_text(before.replace("H200", "B200"))
    try:
        yield
    finally:
        file.write_text(before)
