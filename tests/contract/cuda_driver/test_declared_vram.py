"""What a container declares of VRAM is all that its processes get, by whatever call, and their programs live on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus

pytestmark = pytest.mark.root
MIB = 1 << 20
LIMIT = 64 * MIB

PRELUDE = """
import os, subprocess, sys
from cuda.bindings import driver as cuda
MIB, LIMIT, OOM = 1 << 20, 64 << 20, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
def code(answer):
    return answer[0]
def call(answer):
    assert answer[0] == cuda.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) == 2 else answer[1:]
def free():
    return call(cuda.cuMemGetInfo())[0]
call(cuda.cuInit(0))
context = call(cuda.cuDevicePrimaryCtxRetain(0))
call(cuda.cuCtxSetCurrent(context))
wanted = cuda.CUmemAllocationProp()
wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
def child(body, **options):
    return subprocess.Popen([sys.executable, "-c", os.environ["PRELUDE"] + body], text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, **options)
"""

BODIES = {
    "whole_limit_and_no_more_can_be_allocated": """
        first = call(cuda.cuMemAlloc(40 * MIB))
        assert code(cuda.cuMemAlloc(25 * MIB)) == OOM
        second = call(cuda.cuMemAlloc(24 * MIB))
        assert code(cuda.cuMemAlloc(1)) == OOM
        call(cuda.cuMemFree(first))
        call(cuda.cuMemAlloc(40 * MIB))
    """,
    "small_ones_count_as_well": """
        held = [call(cuda.cuMemAlloc(MIB)) for _ in range(64)]
        assert code(cuda.cuMemAlloc(256)) == OOM
        call(cuda.cuMemFree(held.pop()))
        call(cuda.cuMemAlloc(256))
    """,
    "managed_and_pitched_memory_counts": """
        managed = call(cuda.cuMemAllocManaged(32 * MIB, 1))
        address, pitch = call(cuda.cuMemAllocPitch(1000, 16 * 1024, 4))
        assert pitch == 1024
        assert code(cuda.cuMemAllocManaged(32 * MIB, 1)) == OOM
        assert code(cuda.cuMemAllocPitch(1000, 17 * 1024, 4)) == OOM
        call(cuda.cuMemFree(address))
        call(cuda.cuMemAllocManaged(32 * MIB, 1))
    """,
    "memory_of_a_pool_counts": """
        stream = call(cuda.cuStreamCreate(0))
        first = call(cuda.cuMemAllocAsync(48 * MIB, stream))
        assert code(cuda.cuMemAllocAsync(32 * MIB, stream)) == OOM
        call(cuda.cuMemFreeAsync(first, stream))
        call(cuda.cuMemAllocAsync(64 * MIB, stream))
    """,
    "memory_with_handles_counts_until_its_last_mapping": """
        handle = call(cuda.cuMemCreate(48 * MIB, wanted, 0))
        assert code(cuda.cuMemCreate(32 * MIB, wanted, 0)) == OOM
        address = call(cuda.cuMemAddressReserve(48 * MIB, 0, 0, 0))
        call(cuda.cuMemMap(address, 48 * MIB, 0, handle, 0))
        call(cuda.cuMemRelease(handle))
        assert code(cuda.cuMemCreate(32 * MIB, wanted, 0)) == OOM
        call(cuda.cuMemUnmap(address, 48 * MIB))
        call(cuda.cuMemCreate(64 * MIB, wanted, 0))
    """,
    "gpu_looks_as_large_as_what_is_declared": """
        assert call(cuda.cuDeviceTotalMem(0)) == LIMIT
        assert call(cuda.cuMemGetInfo()) == (LIMIT, LIMIT)
        call(cuda.cuMemAlloc(24 * MIB))
        assert call(cuda.cuMemGetInfo()) == (40 * MIB, LIMIT)
    """,
    "what_the_gpu_does_not_have_is_the_drivers_answer_and_not_counted": """
        other = child("call(cuda.cuMemAlloc(8 * MIB)); print('has', flush=True); input()")
        assert other.stdout.readline() == "has\\n" and free() == 56 * MIB
        other.communicate("\\n")
        assert free() == LIMIT
    """,
    "memory_ends_with_its_context": """
        mine = call(cuda.cuCtxCreate(None, 0, 0))
        call(cuda.cuMemAlloc(48 * MIB))
        call(cuda.cuMemAllocManaged(16 * MIB, 1))
        assert code(cuda.cuMemAlloc(1)) == OOM
        call(cuda.cuCtxDestroy(mine))
        call(cuda.cuCtxSetCurrent(context))
        call(cuda.cuMemAlloc(64 * MIB))
    """,
    "children_share_the_limit": """
        other = child("call(cuda.cuMemAlloc(40 * MIB)); print('has', flush=True); input()")
        assert other.stdout.readline() == "has\\n"
        assert free() == 24 * MIB and code(cuda.cuMemAlloc(25 * MIB)) == OOM
        call(cuda.cuMemAlloc(24 * MIB))
        other.communicate("\\n")
        assert other.returncode == 0
        call(cuda.cuMemAlloc(40 * MIB))
    """,
    "killed_children_leave_nothing_counted": """
        other = child("call(cuda.cuMemAlloc(40 * MIB)); print('has', flush=True); input()")
        other.stdout.readline()
        other.kill()
        other.wait()
        call(cuda.cuMemAlloc(64 * MIB))
    """,
    "other_gpus_have_the_limit_as_well": """
        call(cuda.cuMemAlloc(64 * MIB))
        call(cuda.cuCtxSetCurrent(call(cuda.cuDevicePrimaryCtxRetain(1))))
        assert code(cuda.cuMemAlloc(65 * MIB)) == OOM
        call(cuda.cuMemAlloc(64 * MIB))
        other = child("print(free() // MIB)", env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"})
        assert other.communicate()[0] == "0\\n"
    """,
    "forked_child_has_nothing_of_it": """
        call(cuda.cuMemAlloc(64 * MIB))
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        assert code(cuda.cuMemAlloc(1)) == OOM and free() == 0
    """,
    "thousands_of_allocations_are_remembered": """
        for _ in range(12):
            held = [call(cuda.cuMemAlloc(8192)) for _ in range(400)]
            for address in held:
                call(cuda.cuMemFree(address))
        assert free() == LIMIT
        call(cuda.cuMemAlloc(64 * MIB))
    """,
}


@pytest.fixture
def inside(gpus: Gpus, libraries: Path, preload: Path, tmp_path: Path) -> Callable[[str], None]:
    """Run Python that uses the driver with a limit; it fails by an exception."""

    def run(body: str) -> None:
        environment = {
            **os.environ,
            **gpus.environment(libraries),
            "LD_PRELOAD": str(preload),
            "KYBERNATE_VRAM": f"{LIMIT}:{tmp_path}/ledger",
            "PRELUDE": PRELUDE,
        }
        done = subprocess.run([sys.executable, "-c", PRELUDE + body], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return run


@pytest.mark.parametrize("what", BODIES)
def test_declared_vram(inside: Callable[[str], None], what: str) -> None:
    inside(textwrap.dedent(BODIES[what]))
