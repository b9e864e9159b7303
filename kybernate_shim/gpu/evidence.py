"""What can be seen of a process from outside that shows how it uses its GPUs: maps, environment, descriptors, sockets.

Nothing here judges; see `preflight`. The environment is that of the process's start: what it has set since is hidden.
Source: proc(5); NCCL's names of its segments (/dev/shm/nccl-*) and of its UNIX sockets (nccl-socket-*); the maps of
processes with and without managed memory, compared on an H100 with driver 580.159.04.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kybernate_shim.linux.kernel_text import each_line, lines_of, plain, text_of
from kybernate_shim.linux.own_thread import in_own_thread
from kybernate_shim.linux.unix_sockets import own_names

T = TypeVar("T")
LOOK_SECONDS = 10.0
VARIABLES = ("NCCL_", "CUDA_", "NVIDIA_VISIBLE_DEVICES", "WORLD_SIZE")
MOST_ENVIRONMENT = 8 << 20  # bytes; what exec takes with the usual limit of the stack
LIBRARIES = ("libcuda.so", "libnccl", "nvshmem_bootstrap", "nvshmem_transport")
SOCKET_MARKS = (MPS_MARK, NCCL_MARK) = ("nvidia-mps", "nccl-socket")
ESTABLISHED = "01"
UNIFIED_DEVICE = "/nvidia-uvm"
POOL_BYTES = 2 << 20  # of that device, the driver maps a pool of semaphores of this size into every process


@dataclass(frozen=True)
class Evidence:
    """One process. `libraries`, `segments` (in /dev/shm) and `descriptors` are paths, as the process sees them.

    `sockets` are names with one of SOCKET_MARKS, of UNIX sockets that it has open or is connected to; `peers` the pids,
    of those looked at, to which it has a TCP connection; `managed_bytes` what it maps of the unified-memory device, the
    driver's own pool left out; `imports` how many handles and mappings it has of other processes' memory, where the
    preload library counts them.
    """

    pid: int
    name: str = ""
    libraries: frozenset[str] = frozenset()
    segments: frozenset[str] = frozenset()
    descriptors: frozenset[str] = frozenset()
    sockets: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    peers: frozenset[int] = frozenset()
    managed_bytes: int = 0
    imports: int = 0

    def maps(self, library: str) -> str:
        """Return the path of the mapped library whose file name begins so, "" for none."""
        return next((path for path in sorted(self.libraries) if Path(path).name.startswith(library)), "")


def holds_driver(pid: int) -> bool:
    """Return whether a process has loaded libcuda, without which it can hold no CUDA state. False when it is gone."""
    try:
        return any("libcuda.so" in line for line in each_line(f"/proc/{pid}/maps"))
    except OSError:
        return False


def holders(pids: Iterable[int]) -> list[int]:
    """Return those of `pids` that have loaded libcuda."""
    return [pid for pid in pids if holds_driver(pid)]


async def seen(looking: Callable[[], T]) -> T:
    """Return what `looking` sees of processes, any of which may block it. Raises TimeoutError."""
    try:
        return await in_own_thread(looking, LOOK_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"the container's processes could not be examined within {LOOK_SECONDS:g} s") from None


def look(pids: Iterable[int]) -> list[Evidence]:
    """Return the evidence on those of `pids` that live."""
    pids = list(pids)
    peers = _peers(pids)
    return [evidence for pid in pids if (evidence := _look_at(pid, peers.get(pid, frozenset()))) is not None]


def _environment(process: Path) -> bytes:
    """Return the beginning of an environment, which a process can make as large as its memory."""
    with (process / "environ").open("rb") as stream:
        return stream.read(MOST_ENVIRONMENT)


def _look_at(pid: int, peers: frozenset[int]) -> Evidence | None:
    process = Path(f"/proc/{pid}")
    try:
        maps = text_of(process / "maps")
        files = _mapped_files(maps)
        return Evidence(
            pid=pid,
            name=plain(text_of(process / "comm").strip()),
            libraries=frozenset(path for path in files if Path(path).name.startswith(LIBRARIES)),
            segments=frozenset(path for path in files if path.startswith("/dev/shm/")),
            descriptors=(links := frozenset(_links(process / "fd"))),
            sockets=frozenset(own_names(pid, links, SOCKET_MARKS)),
            environment=_variables(_environment(process)),
            peers=peers,
            managed_bytes=_managed_bytes(maps),
            imports=_imports(pid, maps),
        )
    except OSError:
        return None  # it has ended, and its GPU state with it


def _mapped_files(maps: str) -> set[str]:
    return {path for line in lines_of(maps) if (path := line[73:].removesuffix(" (deleted)")).startswith("/")}


def _managed_bytes(maps: str) -> int:
    sizes = [
        int(end, 16) - int(start, 16)
        for line in lines_of(maps)
        if line.endswith(UNIFIED_DEVICE)
        for start, end in [line.split(None, 1)[0].split("-")]
    ]
    return sum(size for size in sizes if size > POOL_BYTES)


def _imports(pid: int, maps: str) -> int:
    # Here, because nothing of the arena is loaded where there is no GPU.
    from kybernate_shim.arena.control import MAPPED_AS
    from kybernate_shim.arena.imports import imports_of

    return imports_of(pid) if MAPPED_AS in maps else 0


def _links(directory: Path) -> Iterator[str]:
    for entry in directory.iterdir():
        try:
            yield str(entry.readlink())
        except OSError:
            continue  # closed while we looked


def _variables(environ: bytes) -> dict[str, str]:
    entries = (entry.partition("=") for entry in environ.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in entries if name.startswith(VARIABLES)}


def _peers(pids: Sequence[int]) -> dict[int, frozenset[int]]:
    """Return which of `pids` have TCP connections to which others of them."""
    owners: dict[str, int] = {}
    for pid in pids:
        try:
            links = list(_links(Path(f"/proc/{pid}/fd")))
        except OSError:
            continue
        owners |= {found[1]: pid for link in links if (found := re.match(r"socket:\[(\d+)", link))}
    ends = {(local, remote): owners[inode] for local, remote, inode in _connections(pids) if inode in owners}
    peers: dict[int, set[int]] = {}
    for (local, remote), pid in ends.items():
        other = ends.get((remote, local), pid)
        if other != pid:
            peers.setdefault(pid, set()).add(other)
    return {pid: frozenset(others) for pid, others in peers.items()}


def _connections(pids: Sequence[int]) -> Iterator[tuple[str, str, str]]:
    """Yield the ends and the inode of each established connection in the processes' network namespaces."""
    for table in (Path(f"/proc/{pid}/net/{kind}") for pid in pids[:1] for kind in ("tcp", "tcp6")):
        try:
            rows = [line.split() for line in lines_of(text_of(table))[1:]]
        except OSError:
            continue
        yield from ((row[1], row[2], row[9]) for row in rows if row[3] == ESTABLISHED)
