"""What a container can leave behind on a node, in one snapshot: the checker that every system test ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from tests.system.ctr import eventually

STATE = Path("/run/containerd")
SHIM_NAMES = ("kybernate-shim", "containerd-shim")
SCRATCH = ("/run/kybernate", "/run/user")  # console sockets
OF_THE_NODE = tuple(Path("/run/kybernate", name) for name in ("versions", "fork-server", "programs", "holders"))
EMPTY_OF_THE_NODE = Path("/run/kybernate/restores")  # stays, but must be empty
LEASES = Path("/var/lib/cni/networks")
RUNTIME_STATE = ("/run/containerd/runc", "/run/runc", "/run/crun")


@dataclass(frozen=True)
class Snapshot:
    """Each field is a set of names; a test must end with the sets with which it began."""

    shims: frozenset[str]
    containers: frozenset[str]
    mounts: frozenset[str]
    sockets: frozenset[str]
    fifos: frozenset[str]
    cgroups: frozenset[str]
    bundles: frozenset[str]
    runtime_state: frozenset[str]
    scratch: frozenset[str]
    addresses: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            shims=frozenset(_processes(lambda name, _: name.startswith(SHIM_NAMES))),
            containers=frozenset(_processes(lambda _, pid: _in_other_mount_namespace(pid))),
            mounts=frozenset(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
            sockets=frozenset(_names(STATE / "s")),
            fifos=frozenset(_names(STATE / "fifo")),
            cgroups=frozenset(_cgroups()),
            bundles=frozenset(
                str(path)
                for root in (STATE, Path("/var/lib/containerd"))
                for path in (root / "io.containerd.runtime.v2.task").glob("*/*")
            ),
            runtime_state=frozenset(_runtime_state()),
            scratch=frozenset(_scratch()),
            addresses=frozenset(_leases()),
        )

    def added(self, later: Snapshot) -> dict[str, list[str]]:
        """Return what `later` has and this one has not, by field; empty when nothing was left over."""
        rows = {field.name: sorted(getattr(later, field.name) - getattr(self, field.name)) for field in fields(self)}
        return {name: row for name, row in rows.items() if row}


def assert_nothing_left(before: Snapshot, *, seconds: float = 15) -> None:
    """Wait until the node is as it was: shims need a moment to end after their container."""

    def left() -> bool:
        added = before.added(Snapshot.take())
        assert not added, f"left over: {added}"
        return True

    eventually(left, seconds=seconds, pause=0.1)


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()] if directory.is_dir() else []


def _processes(wanted: Callable[[str, str], bool]) -> list[str]:
    """Return the processes of which `wanted(name, pid)` holds, but for those that wait to be reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name = (entry / "comm").read_text().strip()
            if wanted(name, entry.name) and "\nState:\tZ" not in (entry / "status").read_text():
                found.append(f"{name}[{entry.name}]")
        except (OSError, ProcessLookupError):
            continue
    return found


def _in_other_mount_namespace(pid: str) -> bool:
    return Path(f"/proc/{pid}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()


def _leases() -> list[str]:
    """Return the addresses that CNI has given to pods; each is a file, next to the allocator's own notes."""
    return [path.name for path in LEASES.glob("*/*") if path.name[0].isdigit()]


def _scratch() -> list[str]:
    """Return the shims' own files, but for what serves the whole node: programs' versions, and some sockets."""
    found = [path for root in SCRATCH for path in Path(root).glob("**/*")]
    return [str(path) for path in found if not {path, *path.parents} & {*OF_THE_NODE} and path != EMPTY_OF_THE_NODE]


def _runtime_state() -> list[str]:
    """Return what the OCI runtimes remember; newer crun keeps one hidden directory for all containers of a root."""
    found = (path for root in RUNTIME_STATE for path in Path(root).glob("*/*"))
    return [str(path) for path in found if not path.name.startswith(".")]


def _cgroups() -> list[str]:
    """Return all cgroups but those of containerd's namespaces, which every shim leaves to the next container."""
    return [str(path) for path in Path("/sys/fs/cgroup").glob("**/") if path.name not in ("default", "k8s.io")]
