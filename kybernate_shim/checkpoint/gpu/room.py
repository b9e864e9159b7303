"""The room that processes need to come back to their GPUs, the wait for it, and the room that is left besides."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kybernate_shim.arena.control import PLACEHOLDERS
from kybernate_shim.checkpoint.image.manifest import UsedGpu
from kybernate_shim.gpu import gpu_map
from kybernate_shim.gpu.claims import Claim
from kybernate_shim.gpu.gpu_map import GpuMismatch
from kybernate_shim.gpu.helper_answers import CudaProcess, NodeGpu, RoomComing
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import Ahead

FIRST_BYTES = 512 << 20  # of room, which show that another process leaves
STALLED_SECONDS = 10.0  # without any more room, after which the rest of it is taken not to come
PAUSE = 0.005  # between two checks whether a process has left
KEPT_FREE = 8  # one part in so many of a GPU is left alone: others compute there, and the arena needs a context


def bytes_on(gpu: UsedGpu) -> int:
    """Return what all processes had of a GPU's memory."""
    return sum(process.bytes for process in gpu.processes)


def needs(
    gpus: Iterable[UsedGpu], waiting: Iterable[CudaProcess], *, split: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Return what a resume needs of each GPU for the driver's restore, and for what the arena has, if that is `split`.

    On which GPU the arena's bytes were is known to their process alone: each GPU may have to take all of them. The
    driver restores placeholders for them, and they get the room of these.
    """
    sizes = [process.arena_bytes for process in waiting if process.arena_bytes] if split else []
    whole = {gpu.uuid: bytes_on(gpu) for gpu in gpus}
    placeholders = sum(min(size, PLACEHOLDERS) for size in sizes)
    later = {uuid: max(0, min(size, sum(sizes)) - placeholders) for uuid, size in whole.items()} if sizes else {}
    return {uuid: size - later.get(uuid, 0) for uuid, size in whole.items()}, later


def arriving_room(
    later: Mapping[str, int], seconds: float, *, alone: bool = True
) -> tuple[dict[str, int], RoomComing | None]:
    """Return for what of the room that is needed `later` to wait before the arena's bytes are copied, and what comes.

    On one GPU, the copies begin with the first of the room. On several, they wait for all of it: which block needs
    which is known to the process alone. So they do where it is not `alone`: others have claimed some of what comes.
    """
    if len(later) != 1 or not alone:
        return dict(later), None
    ((gpu, size),) = later.items()
    return {gpu: min(size, FIRST_BYTES)}, RoomComing(gpu, min(seconds, STALLED_SECONDS))


def ahead_in_room(
    coming: RoomComing | None, waiting: Iterable[CudaProcess], at_first: Mapping[str, int]
) -> list[Ahead]:
    """Return the process of which the arena may copy into the room that is `coming`, beyond what is needed `at_first`.

    Of several, each would have to know what the others take.
    """
    pids = [process.pid for process in waiting if process.arena_bytes]
    if coming is None or len(pids) != 1:
        return []
    return [Ahead(pids[0], coming.gpu, at_first[coming.gpu], room_comes=True)]


async def await_room(
    helper: CudaHelper, needed: Mapping[str, int], seconds: float, claim: Claim | None = None
) -> Sequence[NodeGpu]:
    """Wait until the GPUs have `needed` bytes free, by UUID, and return how all are then.

    What others have claimed and not taken is not free for `claim`, and is waited for until they have, or have not
    got it. Raises GpuMismatch when the GPUs themselves have no room for longer than `seconds`. The driver's own figures
    count: no other source knows of a process that is not ours.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while True:
        node: Sequence[NodeGpu] = (await helper.info()).gpus
        left = node if claim is None else claim.left(node)
        if _has_room(needed, left):
            return left
        if loop.time() >= until:
            gpu_map.require_room(gpu_map.GpuPlan((), needed), node)
        await asyncio.sleep(PAUSE)


def _has_room(needed: Mapping[str, int], node: Sequence[NodeGpu]) -> bool:
    try:
        gpu_map.require_room(gpu_map.GpuPlan((), needed), node)
    except GpuMismatch:
        return False
    return True


def ahead(
    gpus: Iterable[UsedGpu], pids: Mapping[int, int], plan: gpu_map.GpuPlan, node: Sequence[NodeGpu]
) -> list[Ahead]:
    """Return the processes of which the arena may copy to GPUs before they are there: into what these can spare.

    `gpus` are those of the checkpoint, `pids` the host's by the container's, and `node` how the GPUs of `plan` are now.
    Left out are processes that were on several GPUs, and GPUs for which no source reports the usage by process.
    """
    homes: dict[int, set[str]] = defaultdict(set)
    moved = {pair.old: pair.new for pair in plan.pairs}
    for gpu in gpus:
        for process in gpu.processes:
            homes[process.pid].add(moved.get(gpu.uuid, gpu.uuid))
    least = {gpu.uuid: plan.bytes[gpu.uuid] + gpu.total_bytes // KEPT_FREE for gpu in node if gpu.uuid in plan.bytes}
    free = {gpu.uuid: gpu.free_bytes or 0 for gpu in node}
    return [
        Ahead(pids[name], uuid, least[uuid])
        for name, (uuid, *others) in homes.items()
        if name in pids and not others and uuid in least and free[uuid] > least[uuid]
    ]
