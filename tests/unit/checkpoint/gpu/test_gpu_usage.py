"""Who held what of GPUs: as NVML reports it, and by what else there is where it names no process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from kybernate_shim.checkpoint.gpu.usage import GpuUsage, inner_pid, own_memory, usage_of
from kybernate_shim.checkpoint.image.manifest import GpuMemory, UsedGpu
from kybernate_shim.gpu.helper_answers import CudaInfo, NodeGpu

MIB = 1 << 20
ME = os.getpid()


@pytest.fixture
def other() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "100"])
    yield process.pid
    process.kill()
    process.wait()


def node(*holdings: dict[int, int]) -> CudaInfo:
    names = "abcdefgh"
    gpus = (NodeGpu(f"GPU-{names[i]}", "H200", 1 << 40, 1 << 40, False, i, held) for i, held in enumerate(holdings))
    return CudaInfo("580.1", 13000, tuple(gpus), ())


def test_holdings_are_the_truth_where_they_are_told(other: int) -> None:
    info = node({ME: 5 * MIB, 1: 99}, {ME: 7 * MIB, other: MIB})
    found = usage_of(info, [ME, other], {ME: 40 * MIB, other: 0}, ["GPU-a", "GPU-b"], GpuUsage())
    assert found.processes == (GpuMemory(ME, 12 * MIB), GpuMemory(other, MIB))
    assert [gpu.processes for gpu in found.gpus] == [
        (GpuMemory(ME, 5 * MIB),),
        (GpuMemory(ME, 7 * MIB), GpuMemory(other, MIB)),
    ]
    assert found.vram_bytes == 13 * MIB


def test_growth_and_the_only_usable_gpu_stand_in_for_hidden_holdings(other: int) -> None:
    found = usage_of(node({}, {}), [ME, other], {ME: 40 * MIB, other: 3 * MIB}, ["GPU-b"], GpuUsage())
    held = (GpuMemory(ME, 40 * MIB), GpuMemory(other, 3 * MIB))
    assert found == GpuUsage(held, (UsedGpu("GPU-b", "H200", "580.1", held),))


def test_several_usable_gpus_are_listed_without_shares() -> None:
    found = usage_of(node({}, {}, {}), [ME], {ME: 40 * MIB}, ["GPU-a", "GPU-c"], GpuUsage())
    assert [(gpu.uuid, gpu.processes) for gpu in found.gpus] == [("GPU-a", ()), ("GPU-c", ())]
    assert found.processes == (GpuMemory(ME, 40 * MIB),)


def test_process_without_memory_on_a_gpu_still_counts() -> None:
    """It has called cuInit: it is locked and must be unlocked, but needs no place."""
    found = usage_of(node({}), [ME], {ME: 8192}, ["GPU-a"], GpuUsage())
    assert found == GpuUsage((GpuMemory(ME, 0),), ())


def test_what_left_before_stays_as_it_was_known(other: int) -> None:
    before = usage_of(node({other: 9 * MIB}, {}), [other], {}, ["GPU-a"], GpuUsage())
    found = usage_of(node({}, {ME: 2 * MIB}), [other, ME], {ME: 2 * MIB}, ["GPU-a", "GPU-b"], before)
    assert found.processes == (GpuMemory(other, 9 * MIB), GpuMemory(ME, 2 * MIB))
    assert [(gpu.uuid, gpu.processes) for gpu in found.gpus] == [
        ("GPU-a", (GpuMemory(other, 9 * MIB),)),
        ("GPU-b", (GpuMemory(ME, 2 * MIB),)),
    ]


def test_somebody_who_left_unseen_may_have_used_any_usable_gpu() -> None:
    found = usage_of(node({}), [ME], {}, ["GPU-a"], GpuUsage())
    assert found == GpuUsage((GpuMemory(ME, 0),), (UsedGpu("GPU-a", "H200", "580.1"),))


def test_process_that_has_ended_holds_nothing(other: int) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert inner_pid(ended.pid) is None
    assert usage_of(node({ended.pid: MIB}), [ended.pid], {}, ["GPU-a"], GpuUsage()) == GpuUsage()
    assert list(own_memory([ended.pid, other])) == [other]


def test_own_memory_grows_with_what_is_touched() -> None:
    before = own_memory([ME])[ME]
    touched = bytearray(b"x" * (32 * MIB))
    assert 30 * MIB < own_memory([ME])[ME] - before < 36 * MIB
    del touched
