"""The loopback device of a restored container with a private network, as ctr's have and those of pods do not.

The runtime switches it on when it creates such a container. At a restore it has CRIU make an empty network, and leaves
the device off. `switch_on` does it afterwards. But where sockets are restored, that is too late: no connection of the
image would find its peer. Then the bundle gets a hook for the moment between the two, and this file, which imports the
standard library alone, is its program.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

DEADLINE = 10  # seconds
CLONE_NEWNET = 0x40000000  # not the package's: see above
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1


def is_own(document: Mapping[str, Any]) -> bool:
    """Return whether the network of a parsed config.json is the container's own."""
    namespaces = (document.get("linux") or {}).get("namespaces") or ()
    return any(kind.get("type") == "network" and not kind.get("path") for kind in namespaces)


def add_hook(document: dict[str, Any]) -> None:
    """Let a restore of a parsed config.json switch the device on before CRIU restores sockets."""
    program = {"path": sys.executable, "args": [sys.executable, "-IS", __file__], "timeout": DEADLINE}
    hooks = document["hooks"] = document.get("hooks") or {}
    hooks["createRuntime"] = [program, *(hooks.get("createRuntime") or ())]


def main() -> None:
    """Be the hook: the container's state is on stdin, and its network is not this process's. Raises OSError."""
    pid = json.load(sys.stdin)["pid"]
    _join(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
    switch_on()


def switch_on() -> None:
    """Switch the device on in the network namespace of the calling thread. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def _join(namespace: int) -> None:
    if hasattr(os, "setns"):  # Python 3.12
        os.setns(namespace, CLONE_NEWNET)
        return
    import ctypes  # only here: it costs more than all the others

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    main()
