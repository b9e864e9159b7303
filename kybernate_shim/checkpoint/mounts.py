"""Mounts at a checkpoint and at a restore: who restores each one, and whether the new container offers it.

CRIU makes the mounts of a restored container exactly as they were dumped. The content of *private* ones (tmpfs,
/dev/pts, …) is in the image. *External* ones are the host's: the dump gives each a key, and the restore must offer
something under it. The runtime does so for what config.json lists: bind mounts, masked paths, devices. What a hook
mounted into the container, config.json does not list: that is for us to declare, at both ends.
A mount that is only in the new config.json would be missing in the restored container without a word, so it is refused.
Sources: criu(8), --external and --skip-mnt; criu.org, "External bind mounts".
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kybernate_shim.checkpoint.criu import line
from kybernate_shim.checkpoint.criu_images import DumpedMount
from kybernate_shim.checkpoint.manifest import LONGEST_NAME, Mount
from kybernate_shim.linux.mountinfo import MountPoint
from kybernate_shim.oci.spec import Spec

Action = Literal["keep", "external", "drop"]

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
SHOWN_DIFFERENCES: Final = 20
SHOWN_PATH: Final = 200  # characters

PRIVATE: Final = ("tmpfs", "mqueue", "devpts", "overlay")  # nothing of the kernel's or the node's is in them
READ_ONLY: Final = frozenset({"ro", "rro"})
NULL: Final = "/dev/null"  # the key under which runtimes offer every masked file
VOLUME: Final = re.compile(r"/volumes/(?:kubernetes\.io~)?([^/]+)/|/volume-(subpaths)/")

# What is done about a hook's mounts, first match wins; those that match nothing are kept when they are the container's
# own, and external when they are the host's.
HOOK_POLICY: Final[Sequence[tuple[str, Action]]] = (
    # Made anew by NVIDIA's hooks at every start, under a name with a new UUID; small, and part of the image.
    ("/run/nvidia-ctk-hook*", "keep"),
    ("/proc/driver/nvidia/params", "keep"),
    # One directory of the host's /proc for each GPU, by PCI address: none of them need exist on another node.
    ("/proc/driver/nvidia/gpus/*", "drop"),
)


class MountUnmatched(Exception):
    """Mounts of the image and of the new container differ. `differences` are sentences, one for each mount."""

    def __init__(self, differences: Sequence[str]) -> None:
        shown = "; ".join(differences[:SHOWN_DIFFERENCES])
        more = len(differences) - SHOWN_DIFFERENCES
        super().__init__(
            f"{shown}{f'; and {more} more' if more > 0 else ''}. Nothing was restored; give the new container the"
            " mounts of the dumped one"
        )
        self.differences = tuple(differences)


@dataclass(frozen=True)
class HookMount:
    """A mount that config.json does not list. `source` is where the host sees the same, "" where it does not."""

    destination: str
    type: str
    action: Action
    source: str = ""


@dataclass(frozen=True)
class Matching:
    """What a restore must do about mounts beforehand.

    `lines` go into CRIU's configuration. `directories` and `files` are mount points that must exist in the root
    filesystem.
    """

    lines: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def describe_mounts(spec: Spec, rootfs: Path, found: Iterable[HookMount]) -> tuple[Mount, ...]:
    """Return the mounts of a container for the manifest: config.json's, and those that hooks added.

    Kinds: `pseudo` (the kernel's view of things), `private` (content in the image), `host` (a directory or file of the
    node), the name of a Kubernetes volume (`empty-dir`, `configmap`, `csi`, …), `hook`.
    """
    listed = [_describe(mount, rootfs) for mount in spec.mounts]
    hooks = [Mount(hook.destination, hook.type, "hook", hook.source) for hook in found if hook.action != "drop"]
    return (*listed, *hooks)


def _describe(mount: Mapping[str, Any], rootfs: Path) -> Mount:
    destination = resolve_in(rootfs, str(mount.get("destination") or "/"))
    options = tuple(map(str, mount.get("options") or ()))
    source = str(mount.get("source") or "")
    if not is_bind(mount):
        kind = str(mount.get("type") or "")
        return Mount(destination, kind, "private" if kind == "tmpfs" else "pseudo", "", options)
    volume = VOLUME.search(source)
    return Mount(destination, "bind", next(filter(None, volume.groups())) if volume else "host", source, options)


def is_bind(mount: Mapping[str, Any]) -> bool:
    """Tell whether an entry of config.json is a bind mount, as runtimes decide it."""
    return mount.get("type") == "bind" or bool({"bind", "rbind"} & set(mount.get("options") or ()))


def hook_mounts(
    spec: Spec, rootfs: Path, container: Iterable[MountPoint], host: Sequence[MountPoint]
) -> list[HookMount]:
    """Find what hooks mounted into a running container, by comparing its mounts with config.json.

    `container` are the mounts of its init, `host` ours. A mount whose filesystem we have mounted too is the host's.
    """
    listed = Listed.of(spec, rootfs)
    return [
        _judge(mount, host)
        for mount in container
        if str(mount.path) != "/" and not listed.accounts_for(str(mount.path), mount.type)
    ]


def dump_lines(found: Iterable[HookMount]) -> list[str]:
    """Return the lines of CRIU's configuration by which a dump accepts the mounts of hooks."""
    lines = []
    for mount in found:
        if mount.action == "external":
            lines.append(line("external", f"mnt[{mount.destination}]:{mount.destination}"))
        elif mount.action == "drop":
            lines.append(line("skip-mnt", mount.destination))
    return lines


def match_mounts(
    dumped: Iterable[DumpedMount],
    recorded: Iterable[Mount],
    spec: Spec,
    rootfs: Path,
    *,
    policy: Sequence[str] = (),
    strict: bool = False,
    root_writable: bool = False,
) -> Matching:
    """Compare the mounts in CRIU's images with those of the new container, before anything is restored.

    `recorded` are the manifest's, which say where the mounts of hooks came from; only paths of the node that `policy`
    names, by patterns in which `*` stands for any text but /, are mounted so. `strict`: a filesystem of the kernel's,
    such as proc or sysfs, is restored only where config.json mounts it, and every mount, the root (`root_writable` in
    the image) included, writable only where it is writable there. Both may come from anywhere. Raises MountUnmatched,
    which names the differences.
    """
    listed = Listed.of(spec, rootfs)
    sources = {mount.destination: mount.source for mount in recorded if mount.kind == "hook" and mount.source}
    dumped = list(dumped)
    differences: list[str] = []
    lines: list[str] = []
    for mount in dumped:
        if not is_normal(mount.destination):
            differences.append(f"{mount.destination[:SHOWN_PATH]!a} is no path where a mount of a container can be")
        elif not mount.key or listed.offers(mount.key):
            differences += _changed(mount, listed)
        elif (source := sources.get(mount.destination, "")) and _permits(policy, source) and _exists(source):
            lines.append(line("external", f"mnt[{mount.key}]:{source}"))
        else:
            differences.append(_only_dumped(mount, source, policy))
        if strict:
            differences += _beyond(mount, listed)
    there = {mount.destination for mount in dumped}
    if strict and root_writable and (spec.document.get("root") or {}).get("readonly"):
        differences.append("/ is writable in the image and read-only in the new container's configuration")
    if strict:
        differences += [
            f"{path} is hidden or read-only in the new container's configuration, but was not in the dumped one"
            for path in sorted((listed.masked | listed.read_only) - there)
            if os.path.lexists(path)  # of the kernel's own, which runtimes leave out where the kernel has none
        ]
    differences += [
        f"{destination} is mounted in the new container, but was not in the dumped one"
        for destination in sorted(listed.destinations - there)
    ]
    if differences:
        raise MountUnmatched(differences)
    directories, files = _mount_points(dumped, listed, sources)
    return Matching(tuple(lines), tuple(directories), tuple(files))


def make_mount_points(matching: Matching, rootfs: Path) -> None:
    """Create the mount points that are missing in the mounted root filesystem. Raises OSError.

    No link and no way up is followed, and nothing is opened that is there, since the image decides what that is.
    """
    for destination in (*matching.directories, *matching.files):
        if not is_normal(destination):
            raise OSError(errno.EINVAL, "no path inside the root filesystem", destination)
        *parents, name = destination.strip("/").split("/")
        directory = os.open(rootfs, DIRECTORY)
        try:
            for part in parents:
                _make_directory(part, directory)
                directory, outer = os.open(part, DIRECTORY, dir_fd=directory), directory
                os.close(outer)
            if destination in matching.directories:
                _make_directory(name, directory)
            else:
                _make_file(name, directory)
        finally:
            os.close(directory)


@dataclass(frozen=True)
class Listed:
    """What config.json says of mounts, with destinations as they are after links in the root filesystem."""

    binds: frozenset[str]
    others: Mapping[str, str]  # destination to type
    masked: frozenset[str]
    read_only: frozenset[str]
    devices: frozenset[str]
    mounted_read_only: frozenset[str] = frozenset()

    @classmethod
    def of(cls, spec: Spec, rootfs: Path) -> Listed:
        binds: set[str] = set()
        others: dict[str, str] = {}
        for mount in spec.mounts:
            destination = resolve_in(rootfs, str(mount.get("destination") or "/"))
            if is_bind(mount):
                binds.add(destination)
                others.pop(destination, None)
            else:
                others[destination] = str(mount.get("type") or "")
                binds.discard(destination)
        return cls(
            frozenset(binds),
            others,
            frozenset(map(str, spec.linux.get("maskedPaths") or ())),
            frozenset(map(str, spec.linux.get("readonlyPaths") or ())),
            frozenset(spec.devices),
            frozenset(
                resolve_in(rootfs, str(mount.get("destination") or "/"))
                for mount in spec.mounts
                if READ_ONLY & set(mount.get("options") or ())
            ),
        )

    @property
    def destinations(self) -> frozenset[str]:
        return self.binds | self.others.keys()

    def accounts_for(self, destination: str, kind: str) -> bool:
        """Tell whether the runtime makes the mount at `destination` by itself, from what config.json says."""
        return (
            destination in self.destinations | self.masked | self.read_only | self.devices
            or kind.startswith("cgroup")
            or (kind == "devpts" and destination == "/dev/console")
        )

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
        """Tell whether the runtime offers CRIU something under `key` when it restores."""
        if key == NULL:
            return bool(self.masked)
        if key in self.binds or key in self.devices:
            return True
        return any(kind.startswith("cgroup") and Path(key).is_relative_to(place) for place, kind in self.others.items())


def resolve_in(rootfs: Path, destination: str) -> str:
    """Return `destination` with the links on its way followed as they look from inside `rootfs`; none leads outside.

    Runtimes do the same before they mount, so a Debian image's /var/run/secrets is /run/secrets to CRIU.
    """
    pending = destination.split("/")[::-1]
    done: list[str] = []
    followed = 0
    while pending:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done[:-1]
            continue
        target = _link(rootfs.joinpath(*done, part)) if followed < 40 else ""  # as many as the kernel follows
        if target:
            followed += 1
            done = [] if target.startswith("/") else done
            pending += target.split("/")[::-1]
        else:
            done.append(part)
    return "/" + "/".join(done)


def _link(path: Path) -> str:
    """Return where a link leads, "" for all else, such as a path that is too long for the system."""
    try:
        return str(path.readlink())
    except (OSError, ValueError):
        return ""


def is_normal(destination: str) -> bool:
    """Tell whether a path is absolute and has no parts that lead up, nor any that no mount point has."""
    parts = destination.split("/")[1:]
    return destination.startswith("/") and "" not in parts and all(map(_is_name, parts))


def _is_name(part: str) -> bool:
    if part in (".", "..") or any(mark < " " or mark == "\x7f" for mark in part):
        return False
    try:
        return len(os.fsencode(part)) <= LONGEST_NAME
    except UnicodeEncodeError:
        return False


def _exists(source: str) -> bool:
    """Tell whether an absolute path is that of something; one that the system does not even accept is not."""
    try:
        return source.startswith("/") and Path(source).exists()
    except (OSError, ValueError):
        return False


def _make_file(name: str, parent: int) -> None:
    try:
        os.close(os.open(name, NEW_FILE, 0o644, dir_fd=parent))
    except FileExistsError:
        pass


def _make_directory(name: str, parent: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        pass


def _judge(mount: MountPoint, host: Sequence[MountPoint]) -> HookMount:
    destination = str(mount.path)
    source = _host_path(mount, host)
    action: Action = "external" if source else "keep"
    for pattern, wanted in HOOK_POLICY:
        if fnmatch.fnmatchcase(destination, pattern):
            action = wanted
            break
    return HookMount(destination, mount.type, action, source if action == "external" else "")


def _host_path(mount: MountPoint, host: Sequence[MountPoint]) -> str:
    """Return where the host sees what `mount` shows, "" when it does not."""
    for candidate in host:
        if candidate.device == mount.device and Path(mount.root).is_relative_to(candidate.root):
            return str(candidate.path / Path(mount.root).relative_to(candidate.root))
    return ""


def _changed(mount: DumpedMount, listed: Listed) -> Iterator[str]:
    if not mount.key and mount.destination in listed.binds:
        yield f"{mount.destination} was {mount.type} in the dumped container and is a bind mount in the new one"
    new = listed.others.get(mount.destination)
    if new is not None and not mount.key and new != mount.type and not _same_type(new, mount.type):
        yield f"{mount.destination} was {mount.type} in the dumped container and is {new} in the new one"


def _same_type(wanted: str, kernel: str) -> bool:
    """Tell whether the kernel's type is what config.json asked for; version 1 cgroups hang below a tmpfs."""
    return wanted == "cgroup" and kernel in ("cgroup2", "tmpfs")


def _permits(policy: Sequence[str], source: str) -> bool:
    """Return whether the node's policy has the path, which must be written without detours."""
    if not source.startswith("/") or os.path.normpath(source) != source:
        return False
    return any(re.fullmatch(_any_name(pattern), source) for pattern in policy)


def _any_name(pattern: str) -> str:
    """Return the regular expression of a pattern in which `*` stands for any text but /."""
    return r"[^/\x00-\x1f]*".join(re.escape(part) for part in pattern.split("*"))


def _beyond(mount: DumpedMount, listed: Listed) -> Iterator[str]:
    """Yield what a mount would allow and the new container's configuration does not.

    CRIU makes a mount as writable as it was, whatever config.json says of it, that of a volume, too.
    """
    place = listed.place_of(mount.destination)
    if mount.key == NULL or (not mount.key and mount.type in PRIVATE):
        return  # an empty file, or the container's own; some runtimes leave the tmpfs above version 1 cgroups writable
    if place is not None and {place, mount.key} & listed.unwritable and mount.writable:
        yield f"{mount.destination} is writable in the image and read-only in the new container's configuration"
    if place is None and not mount.key and not _kept(mount):
        yield f"{mount.destination} is a mount of {mount.type}, which the new container's configuration does not have"


def _kept(mount: DumpedMount) -> bool:
    return any(action == "keep" and fnmatch.fnmatchcase(mount.destination, pattern) for pattern, action in HOOK_POLICY)


def _only_dumped(mount: DumpedMount, source: str, policy: Sequence[str]) -> str:
    if source and not _permits(policy, source):
        return (
            f"{mount.destination} was mounted by a hook from {source}, which `hook_mounts` of this node's configuration"
            " does not have"
        )
    if mount.key == NULL:
        return f"{mount.destination} was masked in the dumped container, and nothing is in the new one"
    if source:
        return f"{mount.destination} was mounted by a hook from {source}, which this node does not have"
    return f"{mount.destination} was mounted from outside the dumped container, and is not in the new one"


def _mount_points(
    dumped: Sequence[DumpedMount], listed: Listed, sources: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the directories and the files that must be in the root filesystem, and that no runtime prepares.

    A mount on top of another one finds its place in that one's content, which the image or the host has.
    """
    mounted = {mount.id for mount in dumped}
    directories: list[str] = []
    files: list[str] = []
    for mount in dumped:
        if mount.parent not in mounted and not listed.accounts_for(mount.destination, mount.type):
            source = sources.get(mount.destination)
            (files if source and not Path(source).is_dir() else directories).append(mount.destination)
    return directories, files
