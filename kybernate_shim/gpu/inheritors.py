"""Which processes have inherited NVIDIA's device files from a CUDA process, and can never use them.

A child that is forked from a process with CUDA state gets its mappings and descriptors of the devices, but the driver
refuses every call there (CUDA C++ Programming Guide, "Initialization"; cuInit, CUDA_ERROR_NOT_INITIALIZED). What it
inherited cannot be identified by names or addresses: a process that is initializing CUDA right now, or uses NVML, holds
the same kinds of files. So the kernel has to prove it: a descriptor is the very open file (kcmp(2)) that a
process with CUDA state has under the same number.

The driver also opens devices for a moment. A child that is forked then has a descriptor that no other process has.
Where others of its descriptors are proven, so that the driver refuses to work in it, this one is inherited, too, unless
the child has loaded another library that opens devices, such as NVML. Otherwise, a process that has even one descriptor
without a proof is left alone.

The driver's checkpoint closes the files of the CUDA process. So the proofs are taken before, and kept for as long as
the processes live. A process that is forked afterwards is known by its parent and its start time, and so are its own
children.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from kybernate_shim.linux.kcmp import same_open_file
from kybernate_shim.linux.nvidia_devices import DeviceFiles
from kybernate_shim.linux.process import parent_of, start_time
from kybernate_shim.linux.process_memory import read_maps

# Libraries that open devices, as libcuda's compilers do not.
OPENERS: Final = re.compile(r"libnvidia-(?!ptxjitcompiler|nvvm)|lib\w+_nvidia\.")


class Identity(NamedTuple):
    """A pid, and when its process started, in clock ticks since boot: never reused."""

    pid: int
    started: int


class Snapshot(NamedTuple):
    """The descriptors of NVIDIA's devices that a process had at a moment, in clock ticks since boot."""

    moment: int
    descriptors: frozenset[int]


@dataclass
class Inheritors:
    """What is proven about the processes of one container."""

    owners: dict[Identity, Snapshot] = field(default_factory=dict)  # those with CUDA state
    proven: dict[Identity, frozenset[int]] = field(default_factory=dict)  # those that inherited, with their descriptors

    def observe(self, owners: Iterable[DeviceFiles], others: Iterable[DeviceFiles], moment: int) -> None:
        """Take proofs; `owners` have CUDA state, `others` have not. `moment` is before the processes were listed."""
        self._forget_the_dead()
        for owner in owners:
            if owner.descriptors and (one := identity(owner.pid)) is not None:
                self.owners[one] = Snapshot(moment, owner.descriptors)
        living = [one.pid for one in self.owners]
        for other in others:
            shared = frozenset(fd for fd in other.descriptors if any(_same(pid, other.pid, fd) for pid in living))
            if shared and (one := identity(other.pid)) is not None:
                self.proven[one] = self.proven.get(one, frozenset()) | shared

    def follow(self, pids: Iterable[int]) -> None:
        """Take the proofs of those that were forked since, a parent's before its children's.

        So a child stays known even if its parent has closed its files, or has ended, by the time of a query.
        """
        found = [one for pid in pids if (one := identity(pid)) is not None]
        for one in sorted(found, key=lambda one: one.started):
            if shared := self.inherited(one.pid):
                self.proven[one] = shared

    def inherited(self, pid: int) -> frozenset[int]:
        """Return the descriptors that process `pid` has inherited and still has; none where nothing is proven."""
        try:
            one, parent = Identity(pid, start_time(pid)), parent_of(pid)
            above = Identity(parent, start_time(parent)) if parent else None
        except ProcessLookupError:
            return frozenset()
        return judge(one, above, self.owners, self.proven)

    def inherited_of(self, held: DeviceFiles) -> frozenset[int]:
        """Return the same, and what else the process holds and cannot have opened."""
        proven = self.inherited(held.pid)
        return proven | held.descriptors if proven and not opens_devices(held.pid) else proven

    def _forget_the_dead(self) -> None:
        self.owners = {one: seen for one, seen in self.owners.items() if identity(one.pid) == one}
        self.proven = {one: proof for one, proof in self.proven.items() if identity(one.pid) == one}


def judge(
    one: Identity,
    parent: Identity | None,
    owners: Mapping[Identity, Snapshot],
    proven: Mapping[Identity, frozenset[int]],
) -> frozenset[int]:
    """Return what a process has inherited: what is proven, and what it got from its parent since that was seen."""
    late: frozenset[int] = frozenset()
    if parent is not None:
        late = proven.get(parent, frozenset())
        if (seen := owners.get(parent)) is not None and one.started >= seen.moment:
            late |= seen.descriptors
    return proven.get(one, frozenset()) | late


def opens_devices(pid: int) -> bool:
    """Return whether a process has loaded a library, other than libcuda, that opens NVIDIA's devices."""
    try:
        return any(OPENERS.match(Path(region.name).name) for region in read_maps(pid))
    except OSError:
        return True  # it has ended, or cannot be read: nothing is known


def identity(pid: int) -> Identity | None:
    """Return the process that has the pid, None where there is none."""
    with suppress(ProcessLookupError):
        return Identity(pid, start_time(pid))
    return None


def ticks() -> int:
    """Return the time in the unit of `Identity.started`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _same(owner: int, other: int, fd: int) -> bool:
    try:
        return same_open_file(owner, other, fd)
    except OSError:
        return False  # closed, or ended, while we looked
