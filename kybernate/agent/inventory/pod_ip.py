"""The address of a container's network namespace, as the kernel shows it; whatever plug-in has set it."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Final

from kybernate_shim.linux.kernel_text import lines_of, text_of

PROC: Final = Path("/proc")
LOCAL: Final = "/32 host LOCAL"
GLOBAL: Final = "00"  # scope of an IPv6 address


def pod_ip(pid: int, proc: Path = PROC) -> str:
    """Return the first IPv4 address of a process's network that is not a loopback's, else the first global IPv6 one.

    "" for a process that is gone, one on the node's own network, and a network without addresses.
    """
    own = proc / str(pid)
    try:
        if not pid or _link(own / "ns/net") == _link(proc / "self/ns/net"):
            return ""
        return _of_trie(text_of(own / "net/fib_trie")) or _of_ipv6(text_of(own / "net/if_inet6"))
    except OSError:
        return ""


def _link(path: Path) -> str:
    return os.readlink(path)  # noqa: PTH115  # of the kernel's: what it names is not a path


def _of_trie(text: str) -> str:
    """Return the address before the first line that says that it is the network's own."""
    last = ""
    for line in lines_of(text):
        words = line.strip()
        if words.startswith("|-- "):
            last = words.removeprefix("|-- ")
        elif words == LOCAL and not last.startswith("127."):
            return last
    return ""


def _of_ipv6(text: str) -> str:
    fields = [line.split() for line in lines_of(text)]
    found = (one[0] for one in fields if len(one) == 6 and one[3] == GLOBAL)
    return next((str(ipaddress.IPv6Address(int(address, 16))) for address in found), "")
