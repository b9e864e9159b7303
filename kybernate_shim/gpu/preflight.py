"""Whether a container's GPU state would survive: what the driver accepts but cannot restore, or hangs on, is refused.

An objection is certain where the evidence has no other explanation; otherwise it is a suspicion, which a user may
override. Each says what was seen, what would follow and what to do.
Source: measured with driver 580.159 (NCCL, managed and imported memory); CRIU's plugins/cuda/README.md (MPS, MIG).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kybernate_shim.arena.imports import imports_of
from kybernate_shim.errors import Refused
from kybernate_shim.gpu.errors import cuda_memory_imported
from kybernate_shim.gpu.evidence import MPS_MARK, NCCL_MARK, Evidence
from kybernate_shim.gpu.helper_answers import CudaInfo
from kybernate_shim.gpu.nccl_safe import NCCL_SAFE, NCCL_SAFE_ANNOTATION
from kybernate_shim.linux.cgroup.headroom import Headroom

SPARE_BYTES = 256 << 20  # page tables and the driver's own bookkeeping, in addition to the copy
UNDUMPABLE = {
    "anon_inode:[io_uring]": (
        "io_uring",
        "CRIU cannot dump it; forbid it, as by seccomp, kernel.io_uring_disabled=2 or USE_LIBUV=0 (PyTorch)",
    ),
    "/dev/infiniband/": ("RDMA", "CRIU cannot dump its queue pairs; run without it, as by NCCL_IB_DISABLE=1"),
    "/dev/gdrdrv": ("GDRCopy", "CRIU cannot dump it; run without it"),
}


def preflight_refused(objections: Sequence[Objection]) -> Refused:
    """Return why a checkpoint would lose the container's GPU state; nothing has been asked of its processes."""
    text = "; ".join(map(str, objections))
    advice = ""
    if not any(objection.certain for objection in objections):
        advice = '; this is a suspicion, which the annotation kybernate.io/force: "true" or --force overrides'
    return Refused(f"GPU state would be lost: {text}{advice}. The container continues as before")


@dataclass(frozen=True)
class Objection:
    """Why GPU state would be lost: `fact` in a few words, the `evidence` for it, `advice` for the user."""

    fact: str
    evidence: str
    advice: str
    certain: bool

    def __str__(self) -> str:
        return f"{self.fact} ({self.evidence}): {self.advice}"


@dataclass(frozen=True)
class Subject:
    """What is judged. `gpus` are the UUIDs in use, `vram_bytes` what will move into host memory.

    `cuda` are the processes with CUDA state, `others` the rest of the container. `known` is false where it is unknown
    which process holds what: then `gpus` are those that the container may use and `vram_bytes` is all that is in use on
    them.
    """

    node: CudaInfo
    cuda: Sequence[Evidence]
    others: Sequence[Evidence]
    gpus: Sequence[str]
    vram_bytes: int
    room: Headroom
    denied_drivers: Sequence[str] = ()
    known: bool = True


def require_survivable(objections: Sequence[Objection], *, force: bool) -> list[Objection]:
    """Return the suspicions that are overridden. Raises Refused."""
    certain = [objection for objection in objections if objection.certain]
    if certain or (objections and not force):
        raise preflight_refused(certain or objections)
    return list(objections)


def require_no_more_imports(before: Mapping[int, int], pids: Iterable[int]) -> None:
    """Look again at processes that are locked by now. Raises CudaError if one has more than it had before."""
    for pid in pids:
        if imports_of(pid) > before.get(pid, 0):
            raise cuda_memory_imported(pid)


def judge(subject: Subject) -> list[Objection]:
    """Return everything that speaks against a checkpoint, certainties first."""
    objections = [
        *_driver(subject),
        *_partitions(subject),
        *_descriptors([*subject.cuda, *subject.others]),
        *_managed(subject.cuda),
        *_nccl(subject),
        *_peer_memory(subject.cuda),
        *_imports(subject.cuda),
        *_memory(subject),
    ]
    return sorted(objections, key=lambda objection: not objection.certain)


def _driver(subject: Subject) -> Iterator[Objection]:
    node = subject.node
    if node.missing_calls:
        yield Objection(
            "the driver is too old",
            f"{node.driver_version or 'it'} has no {', '.join(node.missing_calls)}",
            "install driver 570 or newer",
            certain=True,
        )
    if pattern := denied(node.driver_version, subject.denied_drivers):
        yield Objection(
            "the driver is known to lose or hang processes",
            f"{node.driver_version} is {pattern!r} of gpu.denied_drivers",
            "install another one, or change that setting",
            certain=True,
        )


def denied(version: str, patterns: Iterable[str]) -> str:
    """Return the pattern that forbids a driver's version, "" for none."""
    return next((pattern for pattern in patterns if version and fnmatchcase(version, pattern)), "")


def _partitions(subject: Subject) -> Iterator[Objection]:
    split = [gpu.uuid for gpu in subject.node.gpus if gpu.mig and gpu.uuid in subject.gpus]
    named = [
        f"{name}={value} of process {process.pid}"
        for process in subject.cuda
        for name, value in process.environment.items()
        if name.endswith("VISIBLE_DEVICES") and "MIG-" in value
    ]
    if split or named:
        yield Objection(
            "MIG",
            ", ".join(split or named),
            "the driver does not checkpoint instances; use a whole GPU",
            certain=True,
        )
    for process in subject.cuda:
        if path := next((path for path in process.descriptors | process.sockets if MPS_MARK in path), ""):
            yield Objection("MPS", f"process {process.pid} has {path} open", "run without the MPS daemon", certain=True)
        elif directory := process.environment.get("CUDA_MPS_PIPE_DIRECTORY"):
            yield Objection(
                "MPS",
                f"process {process.pid} was started with CUDA_MPS_PIPE_DIRECTORY={directory}",
                "run without the MPS daemon",
                certain=False,
            )


def _descriptors(processes: Iterable[Evidence]) -> Iterator[Objection]:
    for process in processes:
        for beginning, (fact, advice) in UNDUMPABLE.items():
            if any(path.startswith(beginning) for path in process.descriptors):
                yield Objection(fact, f"process {process.pid} ({process.name}) has it open", advice, certain=True)
        if any("nvidia-caps-imex-channels" in path for path in process.descriptors):
            yield Objection(
                "multicast or fabric memory",
                f"process {process.pid} has an IMEX channel open",
                "the driver hangs on multicast objects; set NCCL_NVLS_ENABLE=0",
                certain=False,
            )


def _managed(processes: Iterable[Evidence]) -> Iterator[Objection]:
    """Object to memory that moves between host and GPU by itself: the driver takes it out and cannot bring it back.

    Small blocks of it cannot be distinguished from the driver's own use of the device.
    """
    for process in processes:
        if process.managed_bytes:
            yield Objection(
                "managed memory",
                f"process {process.pid} maps {process.managed_bytes >> 20} MiB of /dev/nvidia-uvm",
                "the driver does not restore it; use cudaMalloc in place of cudaMallocManaged",
                certain=False,
            )


def _nccl(subject: Subject) -> Iterator[Objection]:
    """Object to communicators between GPUs whose processes are not configured to avoid what is lost.

    The library alone proves nothing: every PyTorch program maps it.
    """
    users = [process for process in subject.cuda if process.maps("libnccl")]
    unsafe = [process for process in users if not nccl_is_safe(process.environment)]
    signs = sorted({sign for process in users for sign in _communicator_signs(process, users)})
    if unsafe and signs:
        wanted = " ".join(f"{name}={value}" for name, value in NCCL_SAFE.items())
        yield Objection(
            "an NCCL communicator over peer or shared memory",
            f"process {unsafe[0].pid} maps {unsafe[0].maps('libnccl')}; {', '.join(signs)}; its environment at start"
            f" does not have {wanted}",
            f'start the container with {wanted}, which the annotation {NCCL_SAFE_ANNOTATION}: "true" adds',
            certain=False,
        )
    multicast = [process for process in users if process.environment.get("NCCL_NVLS_ENABLE") != "0"]
    if multicast and signs and not unsafe and len(subject.gpus) > 1:
        yield Objection(
            "multicast objects of NCCL",
            f"process {multicast[0].pid} has a communicator over {len(subject.gpus)} GPUs; {', '.join(signs)}; its"
            " environment at start does not have NCCL_NVLS_ENABLE=0",
            "the driver's checkpoint hangs on them; start the container with NCCL_NVLS_ENABLE=0",
            certain=False,
        )


def nccl_is_safe(environment: Mapping[str, str]) -> bool:
    """Return whether NCCL is configured to use only transports that were measured to survive."""
    private = environment.get("NCCL_CUMEM_HOST_ENABLE") == "0" or environment.get("NCCL_SHM_DISABLE") == "1"
    return environment.get("NCCL_P2P_DISABLE") == "1" and private


def _communicator_signs(process: Evidence, users: Sequence[Evidence]) -> Iterator[str]:
    """Yield what shows that `process` has one, with another of the library's `users` where it takes two."""
    if segment := next((path for path in sorted(process.segments) if path.startswith("/dev/shm/nccl-")), ""):
        yield f"process {process.pid} shares {segment}"
    if socket := next((name for name in sorted(process.sockets) if NCCL_MARK in name), ""):
        yield f"process {process.pid} has the UNIX socket {socket}"
    for peer in sorted(process.peers & {user.pid for user in users}):
        yield f"process {process.pid} has a TCP connection to process {peer}"
    if process.environment.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        yield f"process {process.pid} was started with WORLD_SIZE={process.environment['WORLD_SIZE']}"


def _peer_memory(processes: Sequence[Evidence]) -> Iterator[Objection]:
    """Object to memory that GPUs reach in each other.

    NVSHMEM loads a bootstrap and transports when a program begins to use it; its host library proves nothing, because
    every PyTorch program maps it.
    """
    for process in processes:
        if library := process.maps("nvshmem_"):
            yield Objection(
                "NVSHMEM", f"process {process.pid} maps {library}", "peer memory is not restored", certain=False
            )
    shared = [process for process in processes if any("/cuda.shm." in path for path in process.segments)]
    if len(shared) > 1:
        yield Objection(
            "CUDA IPC",
            f"processes {', '.join(str(process.pid) for process in shared)} map /dev/shm/cuda.shm.*",
            "memory that processes share through the driver is not restored; let each have its own",
            certain=False,
        )


def _imports(processes: Sequence[Evidence]) -> Iterator[Objection]:
    for process in processes:
        if process.imports:
            yield Objection(
                "memory imported from another process",
                f"the arena's library counts {process.imports} handles and mappings of it in process {process.pid}",
                "the driver checkpoints the process and does not restore it; release what"
                " cuMemImportFromShareableHandle returned, or let each process have its own memory",
                certain=False,
            )


def _memory(subject: Subject) -> Iterator[Objection]:
    needed = subject.vram_bytes + SPARE_BYTES
    if subject.vram_bytes and subject.room.bytes < needed:
        yield Objection(
            "not enough host memory",
            f"{'' if subject.known else 'up to '}{subject.vram_bytes >> 20} MiB of VRAM are offloaded to the"
            f" container's own memory, {subject.room.limit} leaves {subject.room.bytes >> 20} MiB",
            f"free or allow {(needed - subject.room.bytes) >> 20} MiB more",
            certain=subject.known,
        )
