"""Bytes of an image go into the arena as they arrive, and their memory is given back on the way."""

from __future__ import annotations

import json
from pathlib import Path

from kybernate_shim.arena.memory import Memory
from tests.fakes.cuda import Gpus
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.arena import SIZE, WANTED
from tests.system.gpu.arriving import (
    MEMORY,
    MIB,
    Store,
    held_up,
    put,
    restored,
)


def test_arena_takes_what_has_arrived(ctr: Ctr, gpus: Gpus, store: Store, name: str, tmp_path: Path) -> None:
    log, id = tmp_path / "log", ctr.new_id("gpu")
    put(ctr, name, log, WANTED)
    with restored(ctr, id, log) as container:
        with held_up(store, name, id, log) as restore:
            (file,) = MEMORY.rglob("kybernate-arena-*.bin")
            eventually(lambda: file.stat().st_blocks == 0)  # what has arrived is in the arena by now
            assert Memory(SIZE).free() == SIZE - (MIB << 20)
            store.slowed.release()
            out, err = restore.communicate(timeout=60)
            assert restore.returncode == 0, err
        container.computes_on()
    assert {"arrival", "arena-load"} <= {step["name"] for step in json.loads(out)["steps"]}
