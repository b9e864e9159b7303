"""What of a container is parked is that of its own processes, also where a pid is another one's by now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.checkpoint.gpu import parking
from kybernate_shim.sizes import GRAIN
from kybernate_shim.vram_io.image_files import ArenaFile


def test_pid_that_is_another_containers_by_now_is_not_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "Memory", lambda size: Memory(size, tmp_path))
    memory, owner = Memory(GRAIN, tmp_path), ArenaOwner.of(os.getpid())
    memory.file.touch()
    os.truncate(memory.file, GRAIN)
    memory.confirm(owner, memory.claim(owner, [(0, 0x1000, GRAIN)]).kept)
    file = ArenaFile(os.getpid(), "file", GRAIN, 0, "", ())
    mine, its = (parking.Parked(tmp_path / name, (file,), b"") for name in ("mine", "its"))
    memory.park(owner, its.directory)
    assert (mine.away(), its.away()) == (set(), {os.getpid()})
