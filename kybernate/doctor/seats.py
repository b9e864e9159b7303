"""Seats on this node: what else gives its GPUs out or shares them, and groups of GPUs that the node has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from kybernate.agent.parts.seats import topology_of
from kybernate.agent.seat_settings import Seats, configuration_of
from kybernate.node import cuda
from kybernate.node.failure import Failure
from kybernate.node.finding import HealthFinding
from kybernate.seats.configuration import Configuration, SeatsInvalid

MPS: Final = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
NAME_BYTES: Final = 15  # that the kernel keeps of a process's name
KUBELET: Final = Path("/var/lib/kubelet")
PLUGINS: Final = ("nvidia*.sock",)  # of NVIDIA's device plugin, below kubelet's device-plugins
DRA: Final = ("gpu.nvidia.com*", "compute-domain.nvidia.com*")  # below kubelet's plugins_registry
SUBJECT: Final = "seats"


@dataclass(frozen=True)
class SeatsFacts:
    """What was found. `mps` is a process of MPS, 0 where none runs; `mig` are GPUs that are split into instances.

    `configured` is whether the node has seats; `problem` is what is wrong with them, and `seats` their number.
    `plugins` and `dra` are sockets by which others give GPUs out.
    """

    mps: int = 0
    configured: bool = False
    seats: int = 0
    problem: str = ""
    mig: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    dra: tuple[str, ...] = ()


def findings(facts: SeatsFacts) -> Iterator[HealthFinding]:
    """Yield what is found; nothing on a node without seats and without MPS."""
    if facts.mps:
        found = f"process {facts.mps}: the driver checkpoints no client of MPS, so that it cannot be suspended"
        yield HealthFinding("MPS", "bad", found, "end it: `echo quit | nvidia-cuda-mps-control`")
    if not facts.configured:
        return
    if facts.problem:
        yield HealthFinding(SUBJECT, "bad", facts.problem, "docs/seats.md describes the configuration")
    else:
        yield HealthFinding(SUBJECT, "ok", f"{facts.seats} on this node's GPUs")
    if facts.mig:
        found = f"{', '.join(facts.mig)} in MIG mode: instances are neither checkpointed nor given out by seats"
        yield HealthFinding(SUBJECT, "bad", found, "`nvidia-smi -mig 0`, or leave these GPUs out of the groups")
    if facts.plugins:
        found = f"NVIDIA's device plugin advertises GPUs as well ({facts.plugins[0]}): kubelet gives them out twice"
        yield HealthFinding(SUBJECT, "bad", found, "keep its DaemonSet off this node")
    if facts.dra:
        found = f"a DRA driver of NVIDIA's advertises GPUs as well ({facts.dra[0]}): they are given out twice"
        yield HealthFinding(SUBJECT, "bad", found, "keep its DaemonSet off this node")


def gather(settings: Seats, kubelet: Path = KUBELET) -> SeatsFacts:
    """Look at processes, kubelet's directories, and the driver where seats are configured. Raises OSError."""
    mps = _mps()
    try:
        configuration = configuration_of(settings)
    except SeatsInvalid as error:
        return SeatsFacts(mps, True, problem=str(error))
    if configuration is None or not configuration.profiles:
        return SeatsFacts(mps)
    seats, problem, mig = _on_gpus(configuration)
    plugins = _matching(settings.device_plugins, PLUGINS)
    return SeatsFacts(mps, True, seats, problem, mig, plugins, _matching(kubelet / "plugins_registry", DRA))


def _on_gpus(configuration: Configuration) -> tuple[int, str, tuple[str, ...]]:
    """Return the number of seats on the GPUs that the driver reports, what is wrong, and the GPUs in MIG mode."""
    try:
        info = cuda.info()
    except Failure as error:
        return 0, f"the driver does not answer: {error}", ()
    mig = tuple(gpu.uuid for gpu in info.gpus if gpu.mig)
    try:
        return len(configuration.places(topology_of(info))), "", mig
    except SeatsInvalid as error:
        return 0, str(error), mig


def _mps() -> int:
    names = {name[:NAME_BYTES] for name in MPS}
    found = (process for process in psutil.process_iter(["name"]) if (process.info["name"] or "")[:NAME_BYTES] in names)
    return next((int(process.pid) for process in found), 0)


def _matching(directory: Path, patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(str(path) for pattern in patterns for path in directory.glob(pattern)))
