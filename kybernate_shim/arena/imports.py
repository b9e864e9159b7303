"""How much a process has of other processes' VRAM, which its preload library counts."""

from __future__ import annotations

from kybernate_shim.arena.control import ControlUnusable, control_of


def imports_of(pid: int) -> int:
    """Return how many handles and mappings a process has of others' memory, 0 where no library counts."""
    try:
        control = control_of(pid)
    except (ControlUnusable, OSError):
        return 0
    if control is None:
        return 0
    with control:
        return control.imports()
