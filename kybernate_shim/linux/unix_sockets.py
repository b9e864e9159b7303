"""The names of a process's UNIX sockets, and of what they are connected to: by its descriptors, never by names alone.

/proc/PID/net/unix lists the whole network namespace, which a pod shares, and with `hostNetwork` the node: any process
there may give its socket any name. A socket is a process's where the process has its inode open. A connection to it
has no name of its own, but the end that its server has accepted has the server's; sock_diag knows which end that is.
Sources: unix(7), proc_net(5), sock_diag(7), UNIX_DIAG_PEER.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from socket import AF_UNIX

from kybernate_shim.linux.kernel_text import lines_of, text_of
from kybernate_shim.linux.namespaces import CLONE_NEWNET, in_namespace
from kybernate_shim.linux.sock_diag import diag_socket

SOCKET = re.compile(r"socket:\[(\d+)\]")
SHOW_PEER = 4  # UDIAG_SHOW_PEER


def own_names(pid: int, links: Iterable[str], marks: tuple[str, ...]) -> set[str]:
    """Return those names with one of `marks` that sockets of a process have, or the other ends of its connections.

    `links` are what its descriptors lead to, as in /proc/PID/fd. Blocks; raises OSError when the process ends.
    """
    listed = _listed(text_of(Path(f"/proc/{pid}/net/unix")))
    marked = {inode: name for inode, name in listed.items() if any(mark in name for mark in marks)}
    if not marked:
        return set()  # the usual case, and cheap: asking the kernel needs a library that takes long to import
    own = {int(found[1]) for link in links if (found := SOCKET.fullmatch(link))}
    peers = in_namespace(Path(f"/proc/{pid}/ns/net"), CLONE_NEWNET, _peers)
    return {marked[inode] for inode in own | {peers[one] for one in own if one in peers} if inode in marked}


def _listed(text: str) -> dict[int, str]:
    """Return the names in a /proc/PID/net/unix by their inodes."""
    rows = (line.split(None, 7) for line in lines_of(text)[1:])
    return {int(row[6]): row[7] for row in rows if len(row) == 8 and row[6].isdigit()}


def _peers() -> Mapping[int, int]:
    """Return the inode of the other end of each connected UNIX socket of the thread's network namespace."""
    with diag_socket() as diag:
        diag.bind()
        found = diag.get_sock_stats(family=AF_UNIX, show=SHOW_PEER)
        return {one["udiag_ino"]: peer for one in found if (peer := one.get_attr("UNIX_DIAG_PEER"))}
