"""Whose bytes are in the arena."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.linux.process import is_exiting, start_time


@dataclass(frozen=True)
class ArenaOwner:
    """A process that lives, or lived: a pid alone would be another process's later."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ArenaOwner:
        """Describe a process that lives. Raises FileNotFoundError or ProcessLookupError."""
        return cls(pid, start_time(pid))

    @classmethod
    def named(cls, record: Path) -> ArenaOwner:
        """Return whose record a file is, by its name, PID-START."""
        return cls(*map(int, record.stem.split("-")))

    @property
    def alive(self) -> bool:
        try:
            return start_time(self.pid) == self.started and not is_exiting(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
