"""What config.json says of mounts, with destinations as they are after links in the root filesystem."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kybernate_shim.checkpoint.mounts.paths import MadeMounts, resolve_in
from kybernate_shim.linux.mount.mountinfo import MountPoint
from kybernate_shim.oci.spec import Spec

READ_ONLY: Final = frozenset({"ro", "rro"})
# What every container has; in a user namespace, where none can be made, runtimes bind the node's.
DEFAULT_DEVICES: Final = frozenset(f"/dev/{name}" for name in ("full", "null", "random", "tty", "urandom", "zero"))
NULL: Final = "/dev/null"  # the key under which runtimes offer every masked file


def is_bind(mount: Mapping[str, Any]) -> bool:
    """Return whether an entry of config.json is a bind mount, as runtimes decide it."""
    return mount.get("type") == "bind" or bool({"bind", "rbind"} & set(mount.get("options") or ()))


def located(spec: Spec, rootfs: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each entry of config.json with its destination as a runtime finds it, which makes them in their order."""
    made = MadeMounts(rootfs)
    for mount in spec.mounts:
        destination = made.resolve(declared(mount))
        made.add(destination, rootfs.parent / str(mount.get("source") or "") if is_bind(mount) else None)
        yield mount, destination


def declared(mount: Mapping[str, Any]) -> str:
    """Return the destination as config.json has it."""
    return str(mount.get("destination") or "/")


@dataclass(frozen=True)
class SpecMounts:
    """What config.json says of mounts, with destinations as they are after links on the way there.

    `named` are the keys under which runtimes offer bind mounts to CRIU, with the sources. They look for links in the
    root filesystem alone, and so miss those in other mounts.
    """

    binds: Mapping[str, str]  # destination to source
    others: Mapping[str, str]  # destination to type
    masked: frozenset[str]
    read_only: frozenset[str]
    devices: frozenset[str]
    mounted_read_only: frozenset[str] = frozenset()
    recursive: Mapping[str, str] = field(default_factory=dict)  # destination to source, of those with "rbind"
    named: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: Spec, rootfs: Path, moved: Mapping[str, str] | None = None) -> SpecMounts:
        """Read a configuration. `moved`: bind mounts, by their declared destination, that belong elsewhere."""
        binds: dict[str, str] = {}
        others: dict[str, str] = {}
        recursive: dict[str, str] = {}
        read_only: set[str] = set()
        names: dict[str, str] = {}
        for mount, found in located(spec, rootfs):
            destination = (moved or {}).get(declared(mount), found) if is_bind(mount) else found
            options, source = mount.get("options") or (), str(mount.get("source") or "")
            for table in (binds, others, recursive, names):
                table.pop(destination, None)
            if "rbind" in options:
                recursive[destination] = source
            if is_bind(mount):
                binds[destination] = source
                names[destination] = resolve_in(rootfs, declared(mount))
            else:
                others[destination] = str(mount.get("type") or "")
            if READ_ONLY & set(options):
                read_only.add(destination)
        return cls(
            binds,
            others,
            frozenset(map(str, spec.linux.get("maskedPaths") or ())),
            frozenset(map(str, spec.linux.get("readonlyPaths") or ())),
            frozenset(spec.devices) | (DEFAULT_DEVICES if spec.namespace_path("user") is not None else frozenset()),
            frozenset(read_only),
            recursive,
            {name: binds[destination] for destination, name in names.items()},
        )

    @property
    def destinations(self) -> frozenset[str]:
        return frozenset(self.binds.keys() | self.others.keys())

    def accounts_for(self, destination: str, kind: str) -> bool:
        """Return whether the runtime makes the mount at `destination` by itself, from what config.json says."""
        return (
            destination in self.destinations | self.masked | self.read_only | self.devices
            or kind.startswith("cgroup")
            or (kind == "devpts" and destination == "/dev/console")
        )

    def shows(self, destination: str, source: str, host: Sequence[MountPoint]) -> bool:
        """Return whether a recursive bind mount shows the host's mount at `source` there; a link is not a mount."""
        above = max((place for place in self.recursive if Path(destination).is_relative_to(place)), key=len, default="")
        if not above or destination == above:
            return False
        place = Path(self.recursive[above], Path(destination).relative_to(above))
        return os.path.normpath(source) == source == str(place) and any(mount.path == place for mount in host)

    def place_of(self, destination: str) -> str | None:
        """Return the entry of config.json by which something is mounted there, None where none is."""
        if destination in self.destinations | self.masked | self.read_only | self.devices:
            return destination
        if destination == "/dev/console":
            return destination
        cgroups = (place for place, kind in self.others.items() if kind.startswith("cgroup"))
        return next((place for place in cgroups if Path(destination).is_relative_to(place)), None)

    @property
    def unwritable(self) -> frozenset[str]:
        """What config.json wants read-only or hidden."""
        return self.mounted_read_only | self.read_only | self.masked

    def offers(self, key: str) -> bool:
        """Return whether the runtime offers CRIU something under `key` when it restores."""
        if key in self.named or key in self.devices or (key == NULL and self.masked):
            return True
        return any(kind.startswith("cgroup") and Path(key).is_relative_to(place) for place, kind in self.others.items())
