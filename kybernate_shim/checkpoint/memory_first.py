"""The files of a dump are in memory while the container is frozen, where its directory would make the dump wait.

With `--exit` and `--hold` they never are: the container stays frozen until its image is complete on the disk, so
nothing would be gained. Neither are VRAM bytes, which are written before the freeze.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from kybernate_shim.checkpoint.cleanup import work_name
from kybernate_shim.checkpoint.dump_plan import DumpPlan
from kybernate_shim.checkpoint.dump_request import DumpRequest
from kybernate_shim.checkpoint.freeze_limit import Expected
from kybernate_shim.checkpoint.image import dump_memory
from kybernate_shim.checkpoint.image.counter import Counter
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.read_ahead import read_ahead
from kybernate_shim.checkpoint.rootfs.diff import names_of
from kybernate_shim.checkpoint.rootfs.overlay import find_overlay
from kybernate_shim.checkpoint.target import Target
from kybernate_shim.checkpoint.volumes.save import Stopping
from kybernate_shim.errors import NoRoom
from kybernate_shim.linux.cgroup.headroom import available_bytes
from kybernate_shim.linux.threads import as_long_as_wanted, entered, to_the_end


async def read_what_is_copied(target: Target, request: DumpRequest, plan: DumpPlan, operation: Operation) -> int:
    """Read the files that are copied while the container is frozen, and return how many bytes they have.

    Those are the volumes' and the changed ones. Raises Refused and OSError.
    """
    if not plan.volumes.volumes and not request.rootfs_diff:
        return 0
    stop = threading.Event()
    check, most = Stopping(stop.is_set), available_bytes() // 4

    def files() -> int:
        found = sum(read_ahead(Path(volume.source), most, check=check) for volume in plan.volumes.volumes)
        if request.rootfs_diff:
            skip = names_of(str(mount.get("destination") or "") for mount in target.spec.mounts).__contains__
            found += read_ahead(find_overlay(target.bundle.rootfs).upper, most, skip=skip, check=check)
        return found

    with operation.step("read") as step:
        step.bytes = await as_long_as_wanted(files, stop.set)
    return step.bytes


@asynccontextmanager
async def in_memory_first(
    target: Target, request: DumpRequest, needed: int, *, limited: bool
) -> AsyncIterator[DumpRequest]:
    """Give the request with a directory in memory as its `image` where the dump of `needed` bytes should go there.

    The directory of the caller is its `destination` then, to which `write_out` brings the files. `limited`: the time of
    the freeze is. Raises OSError.
    """
    if request.stays_frozen or request.destination is not None:
        yield request
        return
    name = work_name(target.namespace, target.id, "dump")
    memory = dump_memory.memory_for_dump(name, request.image, needed, target.config.dump_memory, limited=limited)
    async with entered(memory) as directory:
        try:
            yield request if directory is None else replace(request, image=directory, destination=request.image)
        except Exception as error:
            if directory is not None and (isinstance(error, NoRoom) or dump_memory.is_full(directory)):
                error.add_note("the memory for its files is full: with `dump_memory = 0` they go to the disk directly")
            raise


def expected(request: DumpRequest, needed: int) -> Expected:
    """Measure how fast a dump of `needed` bytes can be. Blocks for some tenths of a second. Raises OSError."""
    in_memory = request.destination is not None and not request.stays_frozen
    place = request.destination if request.destination is not None and request.stays_frozen else request.image
    flushed = not in_memory and (request.stays_frozen or dump_memory.page_cache_room(place) < needed)
    return Expected(needed, dump_memory.write_rate(place, flushed=flushed), in_memory, exits=request.stays_frozen)


async def write_out(request: DumpRequest, operation: Operation) -> None:
    """Bring the files that are in memory to their directory. Raises OSError."""
    if request.destination is None or request.encrypted:
        return
    total = sum(path.stat().st_size for path in request.image.iterdir())
    stop = threading.Event()

    def show(done: int) -> None:
        operation.done_bytes = done

    with operation.step("write", total_bytes=total):
        work = partial(dump_memory.write_out, request.image, request.destination, Counter(show), stop.is_set)
        await to_the_end(work, stop.set)
