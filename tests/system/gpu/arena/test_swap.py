"""Two containers change places on a GPU that has room for one."""

from __future__ import annotations

import json

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate, refused
from tests.system.ctr import Ctr
from tests.system.gpu.arena import (
    MIB,
    WANTED,
    small_gpus,
)


def test_two_containers_of_which_one_fits_change_places(ctr: Ctr, gpus: Gpus) -> None:
    large = gpu.command(mib=48, pause_ms=50)
    with gpu.computing(ctr, *large, flags=WANTED) as one, gpu.computing(ctr, *large, flags=WANTED) as two:
        kybernate("suspend", two.id)
        with small_gpus(gpus, 96):  # two contexts, that of the arena's worker, and one program's memory
            for out, back in ((one, two), (two, one)) * 2:
                answer = json.loads(kybernate("swap", out.id, back.id, "--json"))
                assert answer["suspended"] == out.id
                assert "arena-give" in [step["name"] for step in answer["steps"]]
                out.stands_still()
                back.computes_on()
        kybernate("resume", two.id)
        two.computes_on()


def test_container_that_has_left_is_back_where_the_other_cannot_come(ctr: Ctr, gpus: Gpus) -> None:
    with (
        gpu.computing(ctr, *gpu.command(mib=48, pause_ms=50), flags=WANTED) as large,
        gpu.computing(ctr, flags=WANTED) as small,
    ):
        kybernate("suspend", large.id)
        with small_gpus(gpus, 48):
            said = refused("kybernate", "swap", small.id, large.id, "--room-timeout", "1")
            assert f"{large.id} is not resumed: GPU " in said
            assert f"{small.id} is resumed, and runs" in said
            small.computes_on()
            large.stands_still()
        kybernate("resume", large.id)
        large.computes_on()


def test_container_that_cannot_leave_keeps_its_place(ctr: Ctr, gpus: Gpus) -> None:
    large = gpu.command(mib=48, pause_ms=50)
    with gpu.computing(ctr, *large, flags=WANTED) as one, gpu.computing(ctr, *large, flags=WANTED) as two:
        kybernate("suspend", two.id)
        with small_gpus(gpus, 96):
            gpus.switch(f"lock:*:999@{ctr.pid(one.id)}")
            said = refused("kybernate", "swap", one.id, two.id, "--room-timeout", "600")  # ends with the other side
            gpus.switch("")
            assert f"{one.id} is not suspended: CUDA lock" in said
            assert f"{two.id} stays suspended" in said
            one.computes_on()
            two.stands_still()
        kybernate("resume", two.id)
        two.computes_on()


def test_container_that_fails_when_its_place_is_taken_can_be_resumed_later(ctr: Ctr, gpus: Gpus) -> None:
    large = gpu.command(mib=MIB)
    with gpu.computing(ctr, *large, flags=WANTED) as one, gpu.computing(ctr, *large, flags=WANTED) as two:
        kybernate("suspend", two.id)
        with small_gpus(gpus, 48):
            gpus.slow(2)  # its checkpoint fails when the other has come
            gpus.switch(f"checkpoint:*:999@{ctr.pid(one.id)}")
            said = refused("kybernate", "swap", one.id, two.id)
            gpus.switch("")
            assert f"{one.id} is not suspended: CUDA checkpoint" in said
            one_computes = f"{two.id} stays suspended" in said
            (one if one_computes else two).computes_on()
            (two if one_computes else one).stands_still()
        kybernate("resume", (two if one_computes else one).id)
        one.computes_on()
        two.computes_on()
