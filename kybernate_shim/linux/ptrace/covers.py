"""Memory in place of shared mappings that a driver has taken out of a process, so that its threads can read there.

When NVIDIA's driver checkpoints a process, it replaces its mappings of the devices by reserved addresses without
access. But calls such as cuEventQuery, cuStreamQuery, cuStreamSynchronize, cuEventSynchronize and cuEventElapsedTime
read the GPU's semaphores there before they wait for the driver's lock, so that a program that polls an event dies by
SIGSEGV, also where the driver's own tool has it checkpointed. With empty memory in that place they see all work as
done, which it is: the driver has waited for it. At a restore the driver maps its own memory at the same addresses
again.
Source: measured with driver 580.159 on an H200; all 31 mappings of a context came back, and nothing of this was left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from kybernate_shim.linux.ptrace.seized import SeizedProcess

# Lines of /proc/PID/maps, of which a process may have many thousands. The kernel escapes line ends in names.
_SHARED: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (?!---)...s ", re.MULTILINE)
_RESERVED: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ---p [0-9a-f]+ 00:00 0 *$", re.MULTILINE)


class Span(NamedTuple):
    """Addresses in bytes, the end exclusive."""

    start: int
    end: int


def shared_mappings(pid: int) -> list[Span]:
    """Return what a process can access of shared mappings. Raises OSError (ENOENT, ESRCH, EACCES)."""
    return shared_spans(_maps(pid))


def cover(held: SeizedProcess, before: Iterable[Span]) -> int:
    """Cover what was shared `before`, and is reserved only now; return the bytes. Raises OSError, InjectionFailed."""
    spans = taken_away(before, reserved_spans(_maps(held.pid)))
    for span in spans:
        held.map_anonymous(span.start, span.end - span.start)
    return sum(span.end - span.start for span in spans)


def taken_away(before: Iterable[Span], reserved: Iterable[Span]) -> list[Span]:
    """Return the parts of `before` that are `reserved` now, those that touch as one; both come in order."""
    found: list[Span] = []
    rest = list(before)[::-1]
    for now in reserved:
        while rest and rest[-1].end <= now.start:
            rest.pop()
        for span in reversed(rest):
            if span.start >= now.end:
                break
            part = Span(max(span.start, now.start), min(span.end, now.end))
            if found and found[-1].end == part.start:
                part = Span(found.pop().start, part.end)
            found.append(part)
    return found


def shared_spans(maps: bytes) -> list[Span]:
    """Return the shared mappings of a text of /proc/PID/maps that can be accessed in some way."""
    return _spans(_SHARED, maps)


def reserved_spans(maps: bytes) -> list[Span]:
    """Return the private mappings of no file, and without a name, that cannot be accessed."""
    return _spans(_RESERVED, maps)


def _maps(pid: int) -> bytes:
    return Path(f"/proc/{pid}/maps").read_bytes()


def _spans(wanted: re.Pattern[bytes], maps: bytes) -> list[Span]:
    return [Span(int(start, 16), int(end, 16)) for start, end in wanted.findall(maps)]
