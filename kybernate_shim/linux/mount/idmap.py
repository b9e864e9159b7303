"""Mounts whose file owners are translated, for containers with user namespaces. Source: mount_setattr(2)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.linux import libc
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.temporary_directory import new_directory
from kybernate_shim.undo import Undo


@contextmanager
def user_namespace(uidmap: str, gidmap: str) -> Iterator[int]:
    """Yield a descriptor of a new user namespace with these maps ("inside:outside:count,…").

    A child lives for as long as it takes to write its maps. Raises ValueError for a malformed map, else OSError.
    """
    maps = {"uid_map": map_lines(uidmap), "gid_map": map_lines(gidmap)}
    with _child_in_user_namespace() as pid:
        for name, lines in maps.items():
            Path(f"/proc/{pid}/{name}").write_text(lines)
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield namespace
    finally:
        os.close(namespace)


def map_lines(text: str) -> str:
    """Rewrite "inside:outside:count,…" as the lines of /proc/<pid>/uid_map. Raises ValueError."""
    lines = []
    for entry in text.split(","):
        numbers = entry.split(":")
        if len(numbers) != 3 or not all(number.isascii() and number.isdecimal() for number in numbers):
            raise ValueError(f"id map {text!r}: {entry!r} is not inside:outside:count")
        lines.append(" ".join(numbers) + "\n")
    return "".join(lines)


def map_mount(target: str, namespace: int) -> None:
    """Replace the mount at `target` by a copy with translated owners."""
    copy = syscalls.open_tree(
        syscalls.AT_FDCWD, target, syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_RECURSIVE
    )
    try:
        _translate(copy, namespace)
        # Not on top of the original: one umount must be enough.
        syscalls.umount(target, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        syscalls.move_mount(copy, "", syscalls.AT_FDCWD, target, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(copy)


@contextmanager
def mapped_copies(directories: Sequence[str], namespace: int) -> Iterator[list[str]]:
    """Yield temporary directories that show `directories` with translated owners, read-only.

    Read-only, so that no cleanup of temporary files can reach the originals through a directory that was left over.
    """
    with Undo() as undo:
        root = str(new_directory("kybernate-idmap-"))
        undo.callback(os.rmdir, root)
        copies = []
        for number, directory in enumerate(directories):
            copy = os.path.join(root, str(number))  # noqa: PTH118  # strings, as overlay's options need them
            os.mkdir(copy)  # noqa: PTH102
            undo.callback(os.rmdir, copy)
            _mount_copy(directory, copy, namespace)
            undo.callback(syscalls.umount, copy, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
            copies.append(copy)
        yield copies


def _mount_copy(directory: str, target: str, namespace: int) -> None:
    copy = syscalls.open_tree(syscalls.AT_FDCWD, directory, syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC)
    try:
        _translate(copy, namespace, syscalls.MOUNT_ATTR_RDONLY)
        syscalls.move_mount(copy, "", syscalls.AT_FDCWD, target, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(copy)


def _translate(mount: int, namespace: int, attributes: int = 0) -> None:
    flags = syscalls.AT_EMPTY_PATH | syscalls.AT_RECURSIVE
    syscalls.mount_setattr(mount, "", flags, attributes=attributes | syscalls.MOUNT_ATTR_IDMAP, userns=namespace)


@contextmanager
def _child_in_user_namespace() -> Iterator[int]:
    """Fork, because a process with threads cannot change its own user namespace, and posix_spawn has no such option."""
    ready, writing = os.pipe()
    hold, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        _stay(writing, hold, (ready, release))
    os.close(writing)
    try:
        if number := int.from_bytes(os.read(ready, 4), "little"):
            raise OSError(number, os.strerror(number), "user namespace")
        yield pid
    finally:
        os.write(release, b"x")  # a byte, because a child forked meanwhile may hold the pipe open too
        for fd in (release, ready, hold):
            os.close(fd)
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass  # the daemon's reaper was faster


def _stay(writing: int, hold: int, others: Sequence[int]) -> None:
    """Be the child: enter a user namespace, report errno or 0, and end when the parent closes its pipe or dies."""
    number = 0
    try:
        for fd in others:
            os.close(fd)
        try:
            libc.unshare(libc.CLONE_NEWUSER)
        except OSError as error:
            number = error.errno or 1
        os.write(writing, number.to_bytes(4, "little"))
        os.read(hold, 1)
    finally:
        os._exit(0)
