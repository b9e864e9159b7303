"""Where a pod's daemon listens, and who may: the socket's name, taking it, and clearing it away after a crash.

Imported by every `start` and `delete`, so it imports next to nothing itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from kybernate_shim.linux.private import make_directory

SOCKETS = Path("/run/containerd/s")  # compiled into containerd's own shim: not containerd's --state
GROUP_ANNOTATIONS = ("io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id")
NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ENOENT)


def socket_path(address: str, namespace: str, group: str) -> Path:
    """Return the socket of a group, by the same formula as containerd's own shim (which CRI's restore relies on)."""
    import hashlib  # it loads OpenSSL, and `delete` reads the address that `start` has written

    name = os.path.normpath(f"{address}/{namespace}/{group}")
    return SOCKETS / hashlib.sha256(name.encode()).hexdigest()


def group_of(config: Path, container: str) -> str:
    """Return the id under which containers share a daemon: the pod's, or the container's own."""
    annotations = json.loads(config.read_bytes()).get("annotations") or {}
    return next((annotations[name] for name in GROUP_ANNOTATIONS if annotations.get(name)), container)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Let one process at a time look, bind and listen: containers of a pod are started side by side."""
    make_directory(directory)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def listen(path: Path, kind: int = socket.SOCK_STREAM) -> socket.socket | None:
    """Return a listening socket at `path`, or None when somebody already answers there.

    A socket file that nobody listens on, as a killed daemon leaves it, is replaced.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        try:
            listener.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if answers(path, kind):
                listener.close()
                return None
            path.unlink(missing_ok=True)
            listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def clear_away(path: Path) -> None:
    """Remove the socket file of a daemon that was killed; one that somebody listens on stays. Idempotent."""
    if path.parent.is_dir():
        with exclusive(path.parent):
            if not answers(path):
                path.unlink(missing_ok=True)


def answers(path: Path, kind: int = socket.SOCK_STREAM) -> bool:
    """Tell whether somebody listens at `path`; a daemon whose queue of callers is full does."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in NOBODY_LISTENS
