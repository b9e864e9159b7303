"""Mounts that the node's other services have to see.

systemd gives a service with ProtectSystem= and the like a mount namespace of its own, which receives the host's mounts,
and propagates none to the host. So what such a service mounts for others, it mounts in the namespace of the first
process.
"""

from __future__ import annotations

from pathlib import Path

from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.mountinfo import read_mountinfo

HOST = Path("/proc/1/ns/mnt")
OWN = Path("/proc/self/ns/mnt")
NAMES = {syscalls.MS_NOSUID: "nosuid", syscalls.MS_NODEV: "nodev", syscalls.MS_NOEXEC: "noexec"}
SECONDS = 30.0


def is_apart() -> bool:
    """Return whether this process has a different mount namespace from the node's first process."""
    try:
        return HOST.stat().st_ino != OWN.stat().st_ino
    except OSError:
        return False


def mount(source: str, target: str, fstype: str, flags: int, data: str) -> None:
    """Do as syscalls.mount, where all see it. Raises OSError, also where this process does not see it."""
    if not is_apart():
        syscalls.mount(source, target, fstype, flags, data)
        return
    options = ",".join([*(name for flag, name in NAMES.items() if flags & flag), data])
    _in_host("mount", "-t", fstype, "-o", options, source, target)
    if not any(str(one.path) == target for one in read_mountinfo()):
        umount(target)
        raise OSError(f"{target}: what the first process of the node mounts is not seen here")


def umount(target: str) -> None:
    """Detach a mount that `mount` has made. Raises OSError."""
    if is_apart():
        _in_host("umount", "--lazy", "--no-canonicalize", target)
    else:
        syscalls.umount(target, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)


def _in_host(*command: str) -> None:
    import subprocess  # no shim mounts for others

    done = subprocess.run(
        ["nsenter", f"--mount={HOST}", "--", *command],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{command[0]} {command[-1]}: {done.stderr.strip() or f'status {done.returncode}'}")
