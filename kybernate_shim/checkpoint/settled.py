"""What is put right in a restored container before its processes run, where CRIU brings back something else.

Sockets that were renamed are moved from where CRIU has bound them. What is read-only in the new container's config.json
is made read-only: CRIU gives a mount the flags that it had at the dump, and CRIU 4.1 none to the root filesystem. Of
cgroups of version 1, the container sees only its own. Threads and sockets get what programs have chosen for them and
CRIU does not keep, such as CPUs and multicast groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.checkpoint import cgroup_views
from kybernate_shim.checkpoint.mounts.configured import SpecMounts
from kybernate_shim.checkpoint.names import Names, move_sockets
from kybernate_shim.errors import HeldFailed
from kybernate_shim.linux import socket_settings
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.mount.rootfs import attributes_of
from kybernate_shim.linux.namespaces import CLONE_NEWNS, in_namespace
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.socket_settings import SocketSettings
from kybernate_shim.linux.thread_settings import ThreadSettings, put_back
from kybernate_shim.oci.spec import Spec


@dataclass(frozen=True)
class Settled:
    """What one restore has to put right. `read_only` are destinations of mounts, "/" among them where the root is.

    `differences` are the sentences on `threads` that could not have what they had, once it is settled, and
    `of_sockets` those on `sockets`.
    """

    names: Names
    read_only: Sequence[str]
    threads: Sequence[ThreadSettings] = ()
    sockets: Sequence[SocketSettings] = ()
    of_sockets: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        names: Names,
        spec: Spec,
        rootfs: Path,
        threads: Sequence[ThreadSettings] = (),
        moved: Mapping[str, str] | None = None,
        sockets: Sequence[SocketSettings] = (),
    ) -> Settled:
        """Find out what to do. `moved`: mounts, by their declared destination, that are restored elsewhere."""
        root = ["/"] if (spec.document.get("root") or {}).get("readonly") else []
        listed = SpecMounts.of(spec, rootfs, moved)
        # Of version 1, that option is for the hierarchies: runtimes leave the tmpfs above them writable.
        cgroups = {place for place, kind in listed.others.items() if kind.startswith("cgroup")}
        return cls(names, [*root, *sorted((listed.mounted_read_only | listed.read_only) - cgroups)], threads, sockets)

    @property
    def must_be_held(self) -> bool:
        """Return whether the processes must not run before."""
        return bool(self.names.sockets or self.threads or self.sockets) or "/" in self.read_only

    def settle(self, init: int) -> None:
        """Do it for the container of the process `init`. Raises HeldFailed and OSError."""
        try:
            move_sockets(self.names, Path(f"/proc/{init}/root"))
        except OSError as error:
            raise HeldFailed(f"a UNIX socket of the image cannot be moved to its path: {error}") from error
        cgroup_views.narrow(init)
        if self.threads:
            self.differences.extend(put_back(init, self.threads))
        if self.sockets:
            self.of_sockets.extend(socket_settings.put_back(init, self.sockets))
        if writable := self._writable(init):
            in_namespace(Path(f"/proc/{init}/ns/mnt"), CLONE_NEWNS, lambda: _make_read_only(writable))
        if writable := self._writable(init):
            raise HeldFailed(
                f"{', '.join(writable)}: writable in the restored container, and read-only in its configuration"
            )

    def settle_late(self, init: int) -> None:
        """Do it where the processes were not held; they may have ended. Raises HeldFailed and OSError."""
        if self.must_be_held:
            return
        try:
            self.settle(init)
        except OSError:
            if not has_ended(init):
                raise

    def _writable(self, init: int) -> list[str]:
        """Return what is to be read-only and is not; of mounts at one place the last one is seen."""
        seen = {str(mount.path): mount for mount in read_mountinfo(init)}
        return [place for place in self.read_only if place in seen and "ro" not in seen[place].options]


def _make_read_only(places: Sequence[str]) -> None:
    for place in places:
        flags = attributes_of(place, keep_atime=True) | syscalls.MS_RDONLY
        try:
            syscalls.mount("", place, "", syscalls.MS_REMOUNT | syscalls.MS_BIND | flags)
        except OSError as error:
            raise HeldFailed(f"{place} cannot be made read-only: {error.strerror}") from error
