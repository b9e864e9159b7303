"""Where a pod's daemon listens, and who may: the socket's name, taking it, and clearing it away after a crash.

Imported by every `start` and `delete`, so it imports next to nothing itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from pathlib import Path

from kybernate_shim.linux.locks import held, lock_directory
from kybernate_shim.linux.private_files import make_directory

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


def exclusive(directory: Path) -> contextlib.AbstractContextManager[bool]:
    """Let one process at a time look, bind and listen: containers of a pod are started side by side."""
    make_directory(directory)
    return held(lock_directory(directory))


def listen(path: Path, kind: int = socket.SOCK_STREAM) -> socket.socket | None:
    """Return a listening socket at `path`, or None when a process already answers there.

    A socket file on which no process listens, as a killed daemon leaves it, is replaced.
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
    """Remove the socket file of a daemon that was killed; one on which a process listens stays. Idempotent."""
    if path.parent.is_dir():
        with exclusive(path.parent):
            if not answers(path):
                path.unlink(missing_ok=True)


def answers(path: Path, kind: int = socket.SOCK_STREAM) -> bool:
    """Return whether a process listens at `path`; a daemon whose queue of callers is full does."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in NOBODY_LISTENS
