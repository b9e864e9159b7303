"""Work inside another namespace, in a thread that has joined it and ends with the work."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kybernate_shim.linux import libc

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWNET = 0x40000000

T = TypeVar("T")


def in_namespace(namespace: Path, kind: int, work: Callable[[], T]) -> T:
    """Run `work` in a new thread that has joined `namespace`; return what it returns, raise what it raises.

    `kind` is the CLONE_NEW* flag of a kind that a single thread may join: network, UTS, IPC, cgroup, mount.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if kind == CLONE_NEWNS:
                    libc.unshare(libc.CLONE_FS)  # root and working directory become this thread's own
                libc.setns(fd, kind)
            finally:
                os.close(fd)
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="namespace", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def hostname(namespace: Path) -> str:
    """Return the hostname in a UTS namespace."""
    return in_namespace(namespace, CLONE_NEWUTS, socket.gethostname)


def set_hostname(namespace: Path, name: str) -> None:
    in_namespace(namespace, CLONE_NEWUTS, lambda: socket.sethostname(name))
