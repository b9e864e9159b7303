"""A node next to others on one machine: `tests/gpu/beside --gpus 0,2 -- COMMAND…` runs COMMAND on a node of its own.

Places that a node has once on a machine are the command's own, by a mount and a network namespace: /run, /etc, state
and logs below /var, locks, addresses and ports. Of the GPUs it has the device nodes of those that are named, so that
driver and NVML count from 0. Processes see each other, and a container's cgroup has its name: names must differ. All
that is mounted ends with the last process in there. /etc is a copy: containers get it with all that is mounted below.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from tests.gpu.payload import bring_loopback_up

CHECKOUT = Path(__file__).resolve().parents[2]
PRIVATE = ("unshare", "--mount", "--net", "--propagation", "private")
OWN = ("/var/lib/kybernate", "/var/log/kybernate", "/var/lib/cni", "/var/lib/containerd", "/dev/shm")
# Of /run, what the driver's own daemons have there; with a pretended driver, where its GPUs are.
KEPT = ("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-topologyd")
NODE = re.compile(r"nvidia(\d+)")  # of a GPU
TERMINALS = re.compile(r"(tty|vcs)\w+")  # of the machine's console: dozens, which no node needs
PARAMETERS = Path("/proc/driver/nvidia/params")
SIZE = "400g"  # of a tmpfs at most: the default is half of what the machine has at this moment


def main(argv: Sequence[str]) -> NoReturn:
    """Become COMMAND. Exits with 1 where the GPUs are not there."""
    arguments = _arguments(argv)
    if not arguments.inside:
        again = [sys.executable, "-m", "tests.gpu.beside", "--inside", *argv]
        os.chdir(CHECKOUT)
        os.execvp(PRIVATE[0], [*PRIVATE, *again])
    wanted = {int(number) for number in arguments.gpus.split(",")}
    if lacking := wanted - numbers(path.name for path in Path("/dev").iterdir()):
        sys.exit(f"beside: /dev has no GPU {lacking}")
    separate(wanted)
    if arguments.pretended_mib:
        pretend(len(wanted), arguments.pretended_mib << 20)
    os.execvp(arguments.command[0], arguments.command)


def separate(gpus: set[int]) -> None:
    """Make the places of this mount namespace a node's own, with these GPUs alone."""
    bring_loopback_up()
    stage = Path(tempfile.mkdtemp())
    _private_run(stage)
    _private_dev(stage, gpus)
    _mount("-t", "tmpfs", "-o", "mode=755", "none", stage)
    subprocess.run(["cp", "-a", "/etc/.", stage], check=True)
    _mount("--move", stage, "/etc")
    for place in map(Path, OWN):
        place.mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", "-o", f"mode={'1777' if place.name == 'shm' else '755'},size={SIZE}", "none", place)
    stage.rmdir()
    if PARAMETERS.exists():  # else the driver makes the nodes that are left out, as root
        changed = Path("/run/nvidia-params")
        changed.write_text(PARAMETERS.read_text().replace("ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0"))
        _mount("--bind", changed, PARAMETERS)


def numbers(names: Iterable[str]) -> set[int]:
    """Return the numbers of GPUs among names of device nodes."""
    return {int(found[1]) for name in names if (found := NODE.fullmatch(name))}


def _private_run(stage: Path) -> None:
    _mount("-t", "tmpfs", "-o", f"mode=755,size={SIZE}", "none", stage)
    for name in KEPT:
        if (there := Path("/run", name)).is_dir():
            (stage / name).mkdir()
            _mount("--bind", there, stage / name)
    _mount("--move", stage, "/run")


def _private_dev(stage: Path, gpus: set[int]) -> None:
    """Mount a /dev that has all that was there, but for other GPUs."""
    _mount("-t", "tmpfs", "-o", "mode=755", "none", stage)
    for one in sorted(Path("/dev").iterdir()):
        here = stage / one.name
        if TERMINALS.fullmatch(one.name) or numbers([one.name]) - gpus:
            continue
        if one.is_symlink():
            here.symlink_to(one.readlink())
        elif one.is_dir():
            here.mkdir()
            _mount("--rbind", one, here)
        else:
            here.touch()
            _mount("--bind", one, here)
    _mount("--move", stage, "/dev")


def pretend(count: int, size: int) -> None:
    """Give this node so many pretended GPUs of `size` bytes."""
    from tests.fakes.cuda import Gpus  # only in a rehearsal

    Gpus.create(Path("/run/fake-cuda"), count=count, size=size)


def _mount(*argv: str | Path) -> None:
    subprocess.run(["mount", "--no-mtab", *argv], check=True)  # its table lies in /run, which changes


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/beside", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", required=True, metavar="N,…", help="numbers of device nodes, as /dev/nvidia2 has 2")
    parser.add_argument("--pretended-mib", type=int, default=0, metavar="MIB", help="in a rehearsal: of each GPU")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="what to run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
