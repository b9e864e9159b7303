"""Keeps a virtual machine from giving free memory back to its host while something is measured.

Who is the next to use such memory waits until the host has found some again, and who that is, is chance: CRIU restored
the same 2 GiB in 1.1 to 2.9 s, whatever the shim, and in 1.1 to 1.2 s where the memory had stayed.
Source: the kernel's mm/page_reporting.c, and its parameters `min_free_ms` and `max_waiting_mib` where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PARAMETERS = Path("/sys/module/page_reporting/parameters")
LONG = {
    "min_free_ms": 120_000,  # within which what is measured next has taken the memory again
    "max_waiting_mib": 1 << 20,  # more than is free: beyond it, memory is given back without a wait
}


@contextmanager
def free_memory_kept() -> Iterator[None]:
    """Let free memory wait for long before it is given back, where that can be chosen."""
    with ExitStack() as stack:
        for name, value in LONG.items():
            with suppress(OSError):  # another kernel, or not ours to choose
                stack.callback(_set(PARAMETERS / name, value))
        yield


def _set(parameter: Path, value: int) -> Callable[[], object]:
    """Set a parameter, and return what sets it back. Raises OSError."""
    before = parameter.read_text()
    parameter.write_text(str(value))
    return lambda: parameter.write_text(before)
