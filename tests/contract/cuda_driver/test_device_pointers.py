"""Every function of the driver that takes a device pointer, called by a program whose memory is in the arena.

The driver looks at pointers before it waits for its lock, so a call that finds nothing there fails immediately,
where one that finds memory waits until the program is resumed. Which functions there are, NVIDIA's declarations say.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import resume, suspend
from tests.contract.cuda_driver.cycles import LIMITS
from tests.contract.cuda_driver.declarations import device_pointer_functions
from tests.fakes.actor import eventually
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Zoo
from tests.fakes.cuda.zoo import VERSION, cases

Run = Callable[[Callable[[CudaHelper], Any]], Any]

MOMENT = 0.2
PATIENCE = 30.0
AT_ONCE = {"cuPointerGetAttribute", "cuPointerGetAttributes"}  # of what is mapped, with the lock held by any process

VERBS = "the caller's own part of a checkpoint; the pointers are for storage that the node does not use"
CALLED_BY_NO_PROGRAM = {"cuCheckpointProcessCheckpoint": VERBS, "cuCheckpointProcessRestore": VERBS}

NOT_ON_THE_GPU = {
    "textures, surfaces and arrays are not there": """
        cuTexRefGetAddress cuTexRefSetAddress cuTexRefSetAddress2D cuTexObjectCreate cuTexObjectGetResourceDesc
        cuSurfObjectCreate cuSurfObjectGetResourceDesc cuMemcpyAtoD cuMemcpyDtoA""",
    "graphics are not there": """
        cuGLMapBufferObject cuGLMapBufferObjectAsync cuGraphicsResourceGetMappedPointer
        cuExternalMemoryGetMappedBuffer""",
    "a module's variables are not there": "cuModuleGetGlobal cuLibraryGetGlobal cuLibraryGetManaged",
    "managed memory is never suspended": """
        cuMemAdvise cuMemPrefetchAsync cuMemPrefetchBatchAsync cuMemDiscardBatchAsync cuMemDiscardAndPrefetchBatchAsync
        cuMemRangeGetAttribute cuMemRangeGetAttributes cuStreamAttachMemAsync cuMemGetLocationInfo""",
    "memory of other processes is never suspended": """
        cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcCloseMemHandle cuMemPoolExportPointer cuMemPoolImportPointer
        cuMemGetHandleForAddressRange cuMulticastBindAddr cuMulticastBindAddr_v2""",
    "pools are not there": "cuMemAllocFromPoolAsync",
    "a graph's nodes are never changed, and are copies and fills": """
        cuGraphAddNode cuGraphAddNode_v3 cuGraphNodeGetParams cuGraphNodeSetParams cuGraphNodeSetParams_v2
        cuGraphExecNodeSetParams cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphExecMemcpyNodeSetParams
        cuGraphMemsetNodeGetParams cuGraphMemsetNodeSetParams cuGraphExecMemsetNodeSetParams cuGraphAddBatchMemOpNode
        cuGraphBatchMemOpNodeGetParams cuGraphBatchMemOpNodeSetParams cuGraphExecBatchMemOpNodeSetParams
        cuGraphAddMemAllocNode cuGraphMemAllocNodeGetParams cuGraphAddMemFreeNode cuGraphMemFreeNodeGetParams""",
    "other forms of copies that are there": """
        cuMemcpy3DPeer cuMemcpy3DPeerAsync cuMemcpy3DBatchAsync cuMemcpyWithAttributesAsync
        cuMemcpy3DWithAttributesAsync""",
}


@pytest.fixture
def exported(libraries: Path, gpus: Gpus) -> Callable[[str], bool]:
    """Tell whether the pretended GPU has a function."""
    find = ctypes.CDLL(str(libraries / "libcuda.so.1")).cuGetProcAddress_v2

    def has(name: str) -> bool:
        found = ctypes.c_void_p()
        return bool(find(name.encode(), ctypes.byref(found), VERSION, ctypes.c_uint64(), None) == 0)

    return has


@pytest.fixture
def zoo(gpus: Gpus, libraries: Path, preload: Path) -> Iterator[Zoo]:
    started = Zoo(gpus, libraries, preload)
    yield started
    started.kill()


def test_every_declared_function_is_called_or_known_to_be_missing(exported: Callable[[str], bool]) -> None:
    declared = device_pointer_functions()
    missing = {name for names in NOT_ON_THE_GPU.values() for name in names.split()}
    called = {case.split()[0] for case in cases}
    assert declared, "the declarations were not understood"
    assert {name for name in declared if exported(name)} - called == set(CALLED_BY_NO_PROGRAM), "have no case"
    assert {name for name in declared if not exported(name)} - missing == set(), "are not on the pretended GPU"
    assert missing - declared == set(), "are not declared"
    assert {name for name in missing if exported(name)} == set(), "are on the pretended GPU after all"


@pytest.mark.root
def test_calls_on_memory_in_the_arena_wait_and_succeed(use_arena: Run, zoo: Zoo) -> None:
    zoo.prepare(cases)

    async def body(helper: CudaHelper) -> None:
        suspended = await suspend(helper, lambda: [zoo.pid], LIMITS, arena=True)
        assert suspended.taken.bytes, suspended.taken.reasons
        zoo.call()
        assert eventually(lambda: zoo.answers().keys() >= AT_ONCE, seconds=PATIENCE), zoo.answers()
        assert not eventually(lambda: zoo.answers().keys() > AT_ONCE, seconds=MOMENT), zoo.answers()
        await resume(helper, [zoo.pid], limits=LIMITS)

    use_arena(body)
    assert eventually(lambda: zoo.answers().keys() == cases.keys(), seconds=PATIENCE), cases.keys() - zoo.answers()
    assert {name: code for name, code in zoo.answers().items() if code} == {}
    assert zoo.problem() == ""
