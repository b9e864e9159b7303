"""Moves the VRAM bytes of a container: bypassing CRIU, which moves pages in one thread, or through it.

    fast    after the CUDA checkpoint, several threads move the driver's host copy into files of the image, its pages
            dropped on the way, so that CRIU finds a small process; at a restore they fill it again before the CUDA
            restore; nothing is moved where the image is in memory: the driver writes its copy into the files
    plain   CRIU carries them as any other memory

An obstacle to the fast path that is found before anything was changed (a process that cannot be traced, memory that
cannot be read) leads to the plain one, and the image says why. Failures after that are those of the checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from kybernate_shim.checkpoint.gpu.usage import inner_pid
from kybernate_shim.checkpoint.image.manifest import DataPath
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.config import GpuSettings
from kybernate_shim.errors import Refused
from kybernate_shim.gpu.mover_client import Spawner, VramMover, vram_mover
from kybernate_shim.gpu.sequence import undisturbed
from kybernate_shim.linux import huge_pages as pages
from kybernate_shim.logs import Log
from kybernate_shim.vram_io.digest import KIND
from kybernate_shim.vram_io.errors import DataPathRefused, NotTakenAway, VramError
from kybernate_shim.vram_io.image_files import VramFile
from kybernate_shim.vram_io.saved_regions import FILES, SavedRegion, give_up, mapped_files, total_bytes
from kybernate_shim.worker_protocol.mover_jobs import (
    CloseFiles,
    Compare,
    EndWatch,
    ImageFiles,
    Load,
    Prefault,
    Prove,
    PutBack,
    ReadAhead,
    Save,
    Watch,
)

# The processes are as they were when these are raised.
HOLD_SECONDS = 10.0
SLOWEST_RATE = 512 << 20  # bytes a second; the driver was measured to move 1.9 GB/s with small pages
PREFAULT_BYTES = 2 << 30  # below, a worker's start costs what its help saves
BY_THE_DRIVER = "the driver wrote into the image itself"
COPIED = "the driver's file was copied, because a process of the container still had it open"
LET_GO_SECONDS = 30.0  # longer than the worker itself waits for a thread deep in the driver
ATTEMPTS = 2  # to put bytes back: a worker that was lost under the first is replaced for the second


class BytesLost(Exception):
    """Dropped bytes could not be put back: the processes must not continue, for their memory is wrong."""


class VramOffload:
    """The bytes of one checkpoint. `data_path` and `files` are for its manifest; `aclose` ends the worker."""

    def __init__(self, children: Spawner, settings: GpuSettings, log: Log, digest: str = KIND) -> None:
        self.data_path = DataPath("plain", "gpu.data_path")
        self.files: tuple[VramFile, ...] = ()
        self._children = children
        self._settings = settings
        self._log = log
        self._digest = digest
        self._stack = AsyncExitStack()
        self._worker: VramMover | None = None
        self._watched: tuple[Sequence[int], Path] = (), Path()
        self._found: Mapping[int, int] = {}
        self._driven: Mapping[int, SavedRegion] = {}  # what the driver itself has put into files, not yet digested
        self._saved: dict[int, list[SavedRegion]] = {}
        self._dropped: dict[int, list[SavedRegion]] = {}  # parts, known even of a save that has failed

    async def aclose(self) -> None:
        await self._stack.aclose()

    @property
    def driven(self) -> dict[int, int]:
        """The bytes by pid that the driver itself has put into files of the image."""
        return {pid: region.size for pid, region in self._driven.items()}

    @asynccontextmanager
    async def watching(
        self, pids: Sequence[int], offloaded: int = 0, *, image: Path, size: int = 0
    ) -> AsyncIterator[bool]:
        """Enclose the CUDA checkpoint of `pids`, of `size` bytes, and find out where in them it puts the VRAM.

        Where `image` is in memory, the driver is redirected to write it there. The arena has `offloaded` bytes of them.
        The value says whether their threads are stopped.

        Their threads are stopped meanwhile, but only as long as a slow driver takes: the driver would wait forever for
        a lock, such as an allocator's, that one of them happens to hold. Then they resume, and the bytes take the plain
        path.
        """
        with huge_pages(self._settings, self._log):
            if not pids:
                self.data_path = DataPath("plain", "the processes were suspended before")
            if self._settings.data_path != "fast" or not pids or not await self._watch(pids, image, size - offloaded):
                yield False
                return
            assert self._worker is not None
            try:
                yield True
            except BaseException:
                await undisturbed(self._stop_watching())
                raise
            try:
                answer = await self._worker.ask(Compare())
            except VramError as error:
                self._driven = mapped_files(pids, image)
                await self._go_plain(error)
            else:
                self._found, self._driven = answer.found, answer.driven
                for pid, why in answer.uncovered.items():
                    self._log.warning("cuda.not_covered", pid=pid, error=why)
                if self._driven:
                    self.data_path = DataPath("fast", BY_THE_DRIVER)

    async def _watch(self, pids: Sequence[int], image: Path, size: int) -> bool:
        self._watched = pids, image
        names = {pid: inner_pid(pid) or pid for pid in pids}
        try:
            self._worker = await self._stack.enter_async_context(vram_mover(self._children))
            await self._worker.ask(
                Watch(
                    pids=tuple(pids),
                    seconds=_patience(size),
                    names=names,
                    files=new_files(image, self._settings, self._digest),
                    huge=self._settings.huge_pages != "off",
                    expected=size // len(pids),
                    vram_bytes=max(size, 0),
                )
            )
        except VramError as error:
            await self._go_plain(error)
            return False
        except BaseException:
            await undisturbed(self._stop_watching())
            raise
        self.data_path = DataPath("fast")
        return True

    async def _stop_watching(self) -> None:
        """Release the threads, without which nothing can be undone."""
        if self._worker is None:
            return
        try:
            async with asyncio.timeout(LET_GO_SECONDS):
                await self._worker.ask(EndWatch())
        except (VramError, TimeoutError):
            await self._clear()
        await self.aclose()

    async def _clear(self) -> None:
        """Take from the processes what a worker that was lost may have left open there: CRIU would want it back."""
        await self.aclose()
        pids, image = self._watched
        if not any(image.glob(FILES)):
            return
        try:
            async with vram_mover(self._children) as worker:
                await worker.ask(CloseFiles(tuple(pids), image))
        except VramError as error:
            self._log.warning("vram.file_left_open", error=str(error))
        if not self._driven:
            self._forget(image)

    async def _go_plain(self, error: VramError) -> None:
        self.data_path = DataPath("plain", str(error))
        self._log.warning("vram.sent_through_criu", error=str(error))
        await undisturbed(self._clear())

    @asynccontextmanager
    async def moved_out(self, image: Path, operation: Operation, gone: Callable[[], bool]) -> AsyncIterator[None]:
        """Keep the bytes in files of `image`, and out of the processes, which may be `gone` in the end.

        The processes must be neither running CUDA nor frozen at both ends. Raises a VramError with the processes as
        they were, and BytesLost.
        """
        if self.data_path.name == "fast":
            try:
                await self._save(image, operation)
            except DataPathRefused as error:
                await self._keep(image, operation)
                await self._go_plain(error)
            except BaseException:
                await self._put_back(image, operation)
                self._forget(image)
                raise
        elif self._driven:
            await self._keep(image, operation)
        if self.data_path.name == "plain":
            yield
            return
        try:
            yield
        finally:
            if not gone():
                await self._put_back(image, operation)

    async def _keep(self, image: Path, operation: Operation) -> None:
        """Give the processes their bytes as memory of their own, which CRIU can dump, and no file."""
        for pid in self._driven.keys() - self._dropped.keys():
            self._note_drop(pid, self._driven[pid])
        await self._put_back(image, operation)
        self._forget(image)

    async def _save(self, image: Path, operation: Operation) -> None:
        assert self._worker is not None
        names = {pid: inner_pid(pid) or pid for pid in self._found}
        with _moving(operation, "vram-save", sum(self._found.values()) + sum(self.driven.values())) as count:
            job = Save(names, new_files(image, self._settings, self._digest))
            found = await self._worker.ask(job, on_progress=count, on_drop=self._note_drop)
        saved = {pid: found.get(pid, []) for pid in names}
        self.files = tuple(one.in_image(names[pid]) for pid, regions in saved.items() for one in regions)
        self._saved = saved
        if any(one.copied for listed in saved.values() for one in listed):
            self.data_path = DataPath("fast", COPIED)
            self._log.warning("vram.file_kept_open", why=COPIED)

    def _note_drop(self, pid: int, part: SavedRegion) -> None:
        self._dropped.setdefault(pid, []).append(part)

    async def _put_back(self, image: Path, operation: Operation) -> None:
        """Copy, so that who stays off its GPU owns its bytes, whatever becomes of the image, and CRIU can dump it."""
        if self._dropped:
            with _moving(operation, "vram-load", sum(map(total_bytes, self._dropped.values()))):
                await undisturbed(self._try_to_put_back(image))

    async def _try_to_put_back(self, image: Path) -> None:
        failure: VramError | None = None
        job = PutBack(_files(image, self._settings), self._saved or self._dropped)
        for _ in range(ATTEMPTS):
            try:
                async with vram_mover(self._children) as worker:
                    await worker.ask(job)
            except VramError as error:
                failure = error
            else:
                return
        if isinstance(failure, NotTakenAway):
            raise failure
        raise BytesLost(f"VRAM bytes could not be put back: {failure}")

    def _forget(self, image: Path) -> None:
        give_up(self._watched[0], image)
        self._driven = {}
        self.files, self._saved, self._dropped = (), {}, {}


class VramReload:
    """The bytes of one restore."""

    def __init__(self, children: Spawner, settings: GpuSettings, log: Log) -> None:
        self._children = children
        self._settings = settings
        self._log = log
        self._worker: VramMover | None = None

    @asynccontextmanager
    async def expecting(self, image: Image) -> AsyncIterator[None]:
        """Read the files of `image` ahead while the context lasts, in which CRIU works and `fill` is called."""
        files = image.manifest.vram
        with huge_pages(self._settings, self._log):
            if not files:
                yield
                return
            async with vram_mover(self._children) as self._worker:
                job = ReadAhead(self._of(image), [SavedRegion.of(file) for file in files])
                reading = asyncio.ensure_future(self._worker.ask(job))
                try:
                    yield
                finally:
                    await asyncio.wait({reading})

    async def fill(self, image: Image, pids: Mapping[int, int], operation: Operation) -> None:
        """Fill the memory of the restored processes, `pids` from the container's to the host's.

        Every byte is compared with the manifest's digest, here or in `prove`, which has to follow before the processes
        run. Raises a VramError; they must not run then.
        """
        files = image.manifest.vram
        if not files:
            return
        assert self._worker is not None
        regions: dict[int, list[SavedRegion]] = {pids[file.pid]: [] for file in files}
        for file in files:
            regions[pids[file.pid]].append(SavedRegion.of(file))
        with _moving(operation, "vram-load", sum(file.size for file in files)) as count:
            await self._worker.ask(Load(self._of(image), regions), on_progress=count)

    def _of(self, image: Image) -> ImageFiles:
        return ImageFiles(image.path, self._settings.threads, arriving=image.arriving)

    async def prove(self, image: Image) -> None:
        """Compare the rest of the digests, while the driver uses the memory. Raises a VramError, as `fill` does."""
        if image.manifest.vram:
            assert self._worker is not None
            await self._worker.ask(Prove())


@asynccontextmanager
async def prefaulted(
    children: Spawner, settings: GpuSettings, log: Log, pids: Sequence[int], size: int
) -> AsyncIterator[None]:
    """Enclose a CUDA checkpoint of `pids`, of `size` bytes that stay in them, and make huge pages for these meanwhile.

    The driver would make its memory in one thread. A failure here costs nothing but time.
    """
    with huge_pages(settings, log):
        async with AsyncExitStack() as stack:
            if settings.data_path == "fast" and settings.huge_pages != "off" and size >= PREFAULT_BYTES:
                try:
                    worker = await stack.enter_async_context(vram_mover(children))
                    await worker.ask(Prefault(tuple(pids), _patience(size), settings.threads))
                except VramError as error:
                    log.warning("vram.not_prefaulted", error=str(error))
            yield


def _patience(size: int) -> float:
    """Return how long a slow driver may need for so many bytes."""
    return HOLD_SECONDS + size / SLOWEST_RATE


def new_files(image: Path, settings: GpuSettings, digest: str) -> ImageFiles:
    """Return how bytes travel into new files of `image`."""
    return ImageFiles(image, settings.threads, settings.image_pool, digest)


def _files(image: Path, settings: GpuSettings) -> ImageFiles:
    return ImageFiles(image, settings.threads)


@contextmanager
def huge_pages(settings: GpuSettings, log: Log) -> Iterator[None]:
    """Have the driver's host copy made of huge pages, as far as the settings allow and the node can."""
    with ExitStack() as stack:
        try:
            stack.enter_context(pages.huge_pages(settings.huge_pages))
        except Refused as error:
            log.warning("huge_pages.not_enabled", error=str(error))
        yield


@contextmanager
def _moving(operation: Operation, step: str, total: int) -> Iterator[Callable[[int], None]]:
    """Time a step that moves bytes, and let the operation report how many."""

    def count(done: int) -> None:
        operation.done_bytes = done

    with operation.step(step, total_bytes=total) as entry:
        yield count
        entry.bytes = total
