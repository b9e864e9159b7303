"""Suspends into the arena, of containers whose annotation says so."""

from __future__ import annotations

import json
from pathlib import Path

from kybernate_shim.arena.memory import Memory
from kybernate_shim.oci.preload_spec import DESTINATION
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate, refused
from tests.system.ctr import Ctr
from tests.system.gpu.arena import (
    MIB,
    PIECES,
    SIZE,
    WANTED,
    in_arena,
    pieces_copied,
)


def test_annotated_container_suspends_into_the_arena(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=[*WANTED, "--seccomp"]) as container:
        for _ in range(3):
            assert "arena-take" in kybernate("suspend", container.id, "--json")
            assert in_arena(ctr, container.id) == MIB << 20
            container.stands_still()
            assert "arena-give" in kybernate("resume", container.id, "--json")
            assert in_arena(ctr, container.id) == 0
            container.computes_on()


def test_report_on_the_node_tells_the_parts_of_the_arena(gpus: Gpus) -> None:
    (arena,) = [one for one in json.loads(kybernate("doctor", "--json")) if one["subject"] == "arena"]
    assert (arena["verdict"], arena["found"]) == ("ok", "0.1 GiB on NUMA node 0; 0.1 GiB free")


def test_other_containers_do_not_have_the_library(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr) as container:
        pid = ctr.pid(container.id)
        assert b"LD_PRELOAD" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert not Path(f"/proc/{pid}/root{DESTINATION}").exists()
        assert "arena-take" not in kybernate("suspend", container.id, "--json")
        kybernate("resume", container.id)
        container.computes_on()


def test_container_that_does_not_fit_is_suspended_all_the_same(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=(SIZE >> 20) + 2, pause_ms=50), flags=WANTED) as container:
        assert "arena-take" not in kybernate("suspend", container.id, "--json")
        container.stands_still()
        kybernate("resume", container.id)
        container.computes_on()


def test_helper_that_is_killed_meanwhile_is_replaced(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED) as container:
        kybernate("suspend", container.id)
        gpu.kill_helpers()
        assert in_arena(ctr, container.id) == MIB << 20
        kybernate("resume", container.id)
        container.computes_on()


def test_imported_memory_is_refused_for_as_long_as_it_is_there(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    """The driver would take the process out and not bring it back."""
    with gpu.holding(ctr, PIECES, WANTED) as container:
        container.share()
        for command in ("suspend", container.id), ("checkpoint", container.id, str(tmp_path / "image")):
            assert "memory imported from another process" in refused("kybernate", *command)
            assert container.is_right()
        container.unshare()
        assert pieces_copied(container) == PIECES


def test_container_that_is_killed_while_it_is_away_leaves_the_arena_free(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED) as container:
        kybernate("suspend", container.id)
        assert Memory(SIZE).free() == SIZE - (MIB << 20)
    assert Memory(SIZE).free() == SIZE
