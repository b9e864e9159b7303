"""Groups of GPUs, and the seats that profiles put on them. Groups of different sizes overlap.

A seat's name is its group's and its number, such as `g01-s2`: kubelet keeps it in a file across restarts, so it depends
on nothing that changes while the GPUs stay in their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

LINKS: Final = ("X", "NV", "PIX", "PXB", "PHB", "NODE", "SYS")  # the closest first
WORDS: Final = {
    "X": "itself",
    "NV": "a bonded set of that many NVLinks",
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges, not through the host bridge",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe and the interconnect between host bridges of a NUMA node",
    "SYS": "PCIe and the interconnect between NUMA nodes",
}


@dataclass(frozen=True)
class Profile:
    """A resource of kubelet's, and how many GPUs and seats each of its groups has."""

    name: str
    resource: str
    group_size: int
    seats_per_group: int


@dataclass(frozen=True)
class Group:
    """GPUs that serve together, by their indices in order."""

    name: str
    gpus: tuple[int, ...]

    @property
    def mask(self) -> int:
        return sum(1 << gpu for gpu in self.gpus)


@dataclass(frozen=True)
class Place:
    """A seat's place: its name, profile and group."""

    name: str
    profile: Profile
    group: Group


@dataclass(frozen=True)
class Topology:
    """GPUs and how they are connected. `links[a][b]` is a word of LINKS, NV with the number of links, as in NV18.

    `numa` has the NUMA node of each GPU, -1 where it is not known.
    """

    links: tuple[tuple[str, ...], ...]
    numa: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.links)

    def distance(self, one: int, other: int) -> tuple[int, int]:
        """Return what sorts pairs: the closest first, and more NVLinks before fewer."""
        link = self.links[one][other]
        if link.startswith("NV"):
            return (LINKS.index("NV"), -int(link[2:] or 1))
        return (LINKS.index(link), 0) if link in LINKS else (len(LINKS), 0)


def places(profiles: Sequence[Profile], groups: Iterable[Group]) -> Iterator[Place]:
    """Yield all seats of a node: each profile has some on every group of its size."""
    groups = list(groups)
    for profile in profiles:
        for group in groups:
            if len(group.gpus) == profile.group_size:
                for number in range(profile.seats_per_group):
                    yield Place(f"{group.name.lower()}-s{number}", profile, group)


def groups_of(topology: Topology, sizes: Iterable[int]) -> Iterator[Group]:
    """Yield groups of each size, so that each GPU is in one of that size: those that are connected best.

    A larger group is made of smaller ones where its size allows, so that groups are nested. GPUs that are left over are
    in none.
    """
    made: dict[int, list[tuple[int, ...]]] = {1: [(gpu,) for gpu in range(topology.count)]}
    for size in sorted(set(sizes)):
        if size not in made:
            part = max((other for other in made if size % other == 0), default=1)
            made[size] = list(_joined(topology, made[part], size // part))
        yield from (Group("G" + "".join(map(_digit, one)), one) for one in made[size])


def _joined(topology: Topology, parts: list[tuple[int, ...]], count: int) -> Iterator[tuple[int, ...]]:
    """Yield unions of `count` parts: for the first part that is left, those others that are closest to it."""
    left = list(parts)
    while len(left) >= count:
        first, rest = left[0], left[1:]
        chosen = [first]
        for _ in range(count - 1):
            closest = min(rest, key=lambda part: (_spread(topology, [*chosen, part]), part))
            chosen.append(closest)
            rest.remove(closest)
        yield tuple(sorted(gpu for part in chosen for gpu in part))
        left = rest


def _spread(topology: Topology, parts: Iterable[tuple[int, ...]]) -> tuple[tuple[int, int], int]:
    """Return the worst link within a group, and how many NUMA nodes it spans."""
    gpus = [gpu for part in parts for gpu in part]
    worst = max((topology.distance(one, other) for one, other in combinations(gpus, 2)), default=(0, 0))
    return worst, len({topology.numa[gpu] for gpu in gpus})


def _digit(gpu: int) -> str:
    """Return a GPU's index in a group's name; from 10 on it is set apart, so that names stay different."""
    return str(gpu) if gpu < 10 else f"-{gpu}"
