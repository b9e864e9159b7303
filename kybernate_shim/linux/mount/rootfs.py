"""A container's root filesystem: the mounts that containerd hands over at Create, and their end.

Everything here blocks, so the daemon calls it in threads. The mounts belong to the mount namespace of the process,
which is containerd's and the runtime's too. Sources: mount(2), umount(2), mount_namespaces(7).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.linux import openat2
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.idmap import map_mount, mapped_copies, user_namespace
from kybernate_shim.linux.mount.loop_device import loop_device
from kybernate_shim.linux.mount.mountinfo import MountPoint, below
from kybernate_shim.linux.mount.options import MountOptions, parse_options
from kybernate_shim.linux.mount.overlay import fits, lower_directories, mount_overlay, with_lower_directories
from kybernate_shim.linux.process import holders

FUSE_HELPERS = {"fuse.": "mount.fuse", "fuse3.": "mount.fuse3"}
ATIME = syscalls.MS_NOATIME | syscalls.MS_NODIRATIME | syscalls.MS_RELATIME | syscalls.MS_STRICTATIME
ATTRIBUTES = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC | ATIME
SHOWN_OPTIONS = 1000  # of a message: with a hundred layers the rest is noise

RunHelper = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Mount:
    """A mount as containerd describes it. `target` is a path inside the root, empty for the root itself."""

    type: str
    source: str
    options: Sequence[str] = ()
    target: str = ""


class MountFailed(OSError):
    """A mount was refused, and those before it are unmounted again; or something is still mounted. It has all words."""

    def __str__(self) -> str:
        return str(self.strerror)


def _not_mounted(mount: Mount, target: Path, cause: Exception) -> MountFailed:
    return MountFailed(getattr(cause, "errno", None) or errno.EINVAL, _refusal(mount, target, cause))


def _not_unmounted(path: Path, left: Sequence[MountPoint], cause: OSError) -> MountFailed:
    mounts = ", ".join(f"{mount.path} ({mount.type} {mount.source})" for mount in left)
    users = ", ".join(holders(path)) or "no process of this mount namespace"
    return MountFailed(cause.errno, f"cannot unmount {path}: {cause.strerror}; left: {mounts}; used by: {users}")


def mount_rootfs(mounts: Sequence[Mount], root: Path, *, run: RunHelper | None = None) -> None:
    """Perform `mounts` in their order, on `root` or on directories inside it.

    `run` executes a mount helper to its end and raises OSError when it fails; only FUSE types need it.
    Raises MountFailed; nothing of this call is mounted then.
    """
    root = root.absolute()
    root.mkdir(mode=0o711, exist_ok=True)
    done: list[Path] = []
    try:
        for mount in mounts:
            target = root
            try:
                target = _inside(root, mount.target)
                _mount(mount, str(target), run)
            except (OSError, ValueError) as error:
                raise _not_mounted(mount, target, error) from error
            done.append(target)
    except BaseException:
        for target in reversed(done):
            _unmount(target, syscalls.MNT_DETACH)
        raise


def kept_overlay(path: Path) -> int | None:
    """Return a descriptor that keeps the overlay mounted at `path` alive; None where there is none, or it cannot be.

    It can be unmounted all the same. Closing the descriptor is what ends the overlay then, and takes as long as the
    kernel writes. Any other filesystem may be on a device that is to be free after its unmount. Source: the kernel's
    ovl_sync_fs, which that calls.
    """
    path = path.absolute()
    if not any(mount.path == path and mount.type == "overlay" for mount in below(path)):
        return None
    try:
        return syscalls.open_tree(syscalls.AT_FDCWD, str(path), syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC)
    except OSError:
        return None  # an unbindable mount, or a kernel before 5.2


def unmount_tree(path: Path, *, attempts: int = 50, pause: float = 0.05) -> None:
    """Unmount everything at `path` and below it, deepest first. Nothing mounted there is no error.

    What is busy is tried again, `attempts` times in all with `pause` seconds in between.
    Raises MountFailed, which names what is left and who uses it.
    """
    for attempt in range(attempts):
        mounts = below(path)
        failures = [error for mount in mounts if (error := _unmount(mount.path)) is not None]
        if not failures:
            return
        if any(error.errno != errno.EBUSY for error in failures):
            break
        if attempt < attempts - 1:
            time.sleep(pause)
    if left := below(path):
        raise _not_unmounted(path, left, failures[0])


def _unmount(path: Path, flags: int = 0) -> OSError | None:
    try:
        syscalls.umount(str(path), flags | syscalls.UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):  # with these two, it is not mounted (any more)
            return error
    return None


def _mount(mount: Mount, target: str, run: RunHelper | None) -> None:
    for prefix, helper in FUSE_HELPERS.items():
        if mount.type.startswith(prefix):
            _mount_fuse(helper, mount, mount.type.removeprefix(prefix), target, run)
            return
    options = parse_options(mount.options)
    with ExitStack() as undo:
        namespace = undo.enter_context(user_namespace(options.uidmap, options.gidmap)) if options.idmapped else None
        if mount.type == "overlay":
            _mount_layers(mount, options, target, namespace)
        else:
            _mount_plain(mount, options, target)
        try:
            _adjust(options, target)
            if namespace is not None and mount.type != "overlay":
                map_mount(target, namespace)
        except BaseException:
            _unmount(Path(target), syscalls.MNT_DETACH)
            raise


def _mount_layers(mount: Mount, options: MountOptions, target: str, namespace: int | None) -> None:
    """Mount an overlay; its layers are translated rather than itself, which overlay does not support."""
    data = options.data
    with ExitStack() as undo:
        if namespace is not None:
            copies = undo.enter_context(mapped_copies(lower_directories(data), namespace))
            data = tuple(with_lower_directories(data, copies))
        mount_overlay(mount.source, target, options.flags, data)


def _mount_plain(mount: Mount, options: MountOptions, target: str) -> None:
    if not fits(options.data):
        raise OSError(errno.E2BIG, "options longer than a page", target)
    with ExitStack() as undo:
        source = mount.source
        if options.loop:
            source = undo.enter_context(loop_device(source, read_only=bool(options.flags & syscalls.MS_RDONLY)))
        syscalls.mount(source, target, mount.type, options.flags, ",".join(options.data))


def _adjust(options: MountOptions, target: str) -> None:
    """Do what mount(2) leaves for further calls: attributes of a bind mount, and propagation."""
    if options.flags & syscalls.MS_BIND and options.flags & ATTRIBUTES and not options.flags & syscalls.MS_REMOUNT:
        wanted = options.flags & ~syscalls.MS_REC | attributes_of(target, keep_atime=not options.flags & ATIME)
        syscalls.mount("", target, "", wanted | syscalls.MS_REMOUNT)
    for change in options.propagation:
        syscalls.mount("", target, "", change)


def attributes_of(path: str, *, keep_atime: bool) -> int:
    """Return the attributes that a mount has: a remount would drop what it does not repeat."""
    has = os.statvfs(path).f_flag
    flags = has & (syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    if keep_atime:
        flags |= has & (syscalls.MS_NOATIME | syscalls.MS_NODIRATIME)
        flags |= syscalls.MS_RELATIME if has & os.ST_RELATIME else 0
    return flags


def _mount_fuse(helper: str, mount: Mount, subtype: str, target: str, run: RunHelper | None) -> None:
    if run is None:
        raise OSError(errno.ENOSYS, f"no way to run {helper}", target)
    options = [argument for option in mount.options for argument in ("-o", option)]
    run([helper, mount.source, target, *options, "-t", subtype])


def _inside(root: Path, target: str) -> Path:
    """Return the directory `target` of the tree `root`; symlinks from the image cannot lead out of it."""
    if not target.strip("/"):
        return root
    anchor = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = openat2.open_in_root(anchor, target, os.O_PATH)
    finally:
        os.close(anchor)
    try:
        return Path(f"/proc/self/fd/{found}").readlink()
    finally:
        os.close(found)


def _refusal(mount: Mount, target: Path, cause: Exception) -> str:
    options = ",".join(mount.options)
    if len(options) > SHOWN_OPTIONS:
        options = f"{options[:SHOWN_OPTIONS]}… ({len(options)} bytes)"
    reason = getattr(cause, "strerror", None) or str(cause)
    subject = getattr(cause, "filename", None)
    about = f" ({subject})" if subject and subject != str(target) else ""
    flags = parse_options(mount.options).flags
    return f"mount {mount.type} {mount.source} on {target} with flags {flags:#x}, options {options!r}: {reason}{about}"
