"""Which part of the arena's memory lies on which NUMA node: banks, one behind the other in its file.

With a file on a tmpfs, the kernel stores where the pages of a range come from, whichever process touches them first. So
a bank stays what it is for as long as the file exists, and a larger setting adds further banks at the end.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.arena.extents import Extent, take, total
from kybernate_shim.linux.atomic_write import replacing
from kybernate_shim.sizes import NO_NODE, NodeSizes


@dataclass(frozen=True, slots=True)
class Bank:
    """Memory of one NUMA node, or of whichever has some: NO_NODE."""

    node: int
    extent: Extent


def read(path: Path) -> list[Bank]:
    """Read what `write` has written, nothing where it has not."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [Bank(node, Extent(start, size)) for node, start, size in json.loads(text)]


def write(path: Path, banks: Iterable[Bank]) -> None:
    with replacing(path) as stream:
        stream.write(json.dumps([(bank.node, bank.extent.start, bank.extent.size) for bank in banks]))


def missing(banks: Sequence[Bank], sizes: NodeSizes) -> list[Bank]:
    """Return the banks to add for `sizes`. With them, there is never more than the sizes together."""
    end = size_of(banks)
    found: list[Bank] = []
    for node, size in sizes:
        there = sum(bank.extent.size for bank in banks if bank.node == node)
        more = min(size - there, sum(size for _, size in sizes) - end)
        if more > 0:
            found.append(Bank(node, Extent(end, more)))
            end += more
    return found


def surplus(banks: Sequence[Bank], sizes: NodeSizes) -> int:
    """Return how many bytes of the banks are not part of `sizes`, which adding banks cannot change."""
    wanted = dict(sizes)
    return sum(
        max(0, sum(bank.extent.size for bank in banks if bank.node == node) - wanted.get(node, 0))
        for node in {bank.node for bank in banks}
    )


def size_of(banks: Sequence[Bank]) -> int:
    return sum(bank.extent.size for bank in banks)


def fault_of(sizes: NodeSizes, nodes: Mapping[int, int]) -> str:
    """Say what is wrong with configured sizes on a machine whose `nodes` have so many bytes; "" if nothing is.

    A size of no node is not compared: a virtual machine may be given more memory when it is used.
    """
    from kybernate_shim.config import DEFAULT_PATH  # here: workers need nothing else of the configuration

    for node, size in sizes:
        if node != NO_NODE and node not in nodes:
            has = f"has {', '.join(map(str, sorted(nodes)))}" if nodes else "reports none"
            return f"gpu.arena names NUMA node {node}, and this machine {has}: correct {DEFAULT_PATH}"
        if node != NO_NODE and size > nodes[node]:
            there = nodes[node] >> 20
            return f"gpu.arena requires {size >> 20} MiB of NUMA node {node}, which has {there}: correct {DEFAULT_PATH}"
    return ""


def as_text(sizes: NodeSizes) -> str:
    """Write sizes as an argument of a command."""
    return ",".join(f"{node}:{size}" if node != NO_NODE else f"{size}" for node, size in sizes)


def from_text(text: str) -> NodeSizes:
    """Read what `as_text` has written, such as "68719476736", or "0:34359738368,1:34359738368". Raises ValueError."""
    words = [word.rpartition(":") for word in filter(None, text.split(","))]
    return tuple((int(node) if colon else NO_NODE, int(size)) for node, colon, size in words if int(size))


class Room:
    """Free parts of the arena, which `take` makes fewer."""

    def __init__(self, free: Iterable[Extent], banks: Sequence[Bank]) -> None:
        self._free: dict[int, deque[Extent]] = {bank.node: deque() for bank in banks}
        for extent in free:
            for node, part in _cut(extent, banks):
                self._free[node].append(part)
        self._bytes = {node: total(extents) for node, extents in self._free.items()}

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values())

    def take(self, size: int, near: int = NO_NODE) -> Iterator[Extent]:
        """Take `size` bytes, no more than there are: from the banks of node `near`, then from the others.

        They come from the arena's start on: so the same part is used, and pinned, most often.
        """
        for node in sorted(self._free, key=lambda one: one != near):
            some = min(size, self._bytes[node])
            self._bytes[node] -= some
            size -= some
            yield from take(self._free[node], some)


def _cut(extent: Extent, banks: Iterable[Bank]) -> Iterator[tuple[int, Extent]]:
    for bank in banks:
        start, end = max(extent.start, bank.extent.start), min(extent.end, bank.extent.end)
        if start < end:
            yield bank.node, Extent(start, end - start)
