"""The jobs of the VRAM mover, each a method."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import assert_never

from kybernate_shim.arena.control import DRIVER_THREADS
from kybernate_shim.arena.extents import Kept
from kybernate_shim.arena.memory import Memory
from kybernate_shim.errors import Refused
from kybernate_shim.linux.kernel_text import plain
from kybernate_shim.linux.process import comm_of
from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.linux.ptrace.covers import Span, cover, shared_mappings
from kybernate_shim.linux.ptrace.seized import SeizedProcess, threads_named
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.vram_io.arrival import Arrival, arrival_in
from kybernate_shim.vram_io.errors import DataPathRefused, NotTakenAway, TargetGone, VramError
from kybernate_shim.vram_io.files import lies_in_memory
from kybernate_shim.vram_io.image_files import ArenaFile
from kybernate_shim.vram_io.saved_regions import SavedRegion, file_name, total_bytes
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover import arena_files as in_arena
from kybernate_shim.vram_mover import driven
from kybernate_shim.vram_mover.load import Background, FilePrefetch, Proof, load, map_in, mappable, put_back
from kybernate_shim.vram_mover.prefault import prefaulting
from kybernate_shim.vram_mover.regions import appeared
from kybernate_shim.vram_mover.release import release
from kybernate_shim.vram_mover.save import move_out
from kybernate_shim.worker_protocol.messages import JobDone
from kybernate_shim.worker_protocol.mover_jobs import (
    AwaitArena,
    ClaimArena,
    CloseFiles,
    Compare,
    Compared,
    Dropping,
    EndWatch,
    HandOver,
    HoldArena,
    ImageFiles,
    Inheritor,
    Load,
    LoadArena,
    MoverJob,
    Prefault,
    Prove,
    PutBack,
    ReadAhead,
    Release,
    ReleaseResult,
    Save,
    SaveArena,
    Watch,
)
from kybernate_shim.worker_protocol.server import JobCall

HOLD_SECONDS = 5.0
PROGRESS_SECONDS = 0.1
PROOF_THREADS = 4  # next to the driver, which then takes 2.7 s, and 3.5 s next to 16 threads (17 GiB, H100)
RELEASING_THREADS = 8  # each waits for its process most of the time
OPEN_FILES = 64  # each part of a region opens its file


class MoverJobHandler:
    """The state that one job leaves for the next: threads that are held, memory that was found, claimed room."""

    def __init__(self) -> None:
        self._call: JobCall  # of the job that is done now
        self._told = 0.0
        self._proving = threading.Event()  # set, it ends all proofs
        self._letting_go = threading.Lock()
        self._holds: ExitStack | None = ExitStack()
        self._expiry = threading.Timer(0, self._release)
        self._before: dict[int, list[Region]] = {}
        self._found: dict[int, list[Region]] = {}
        self._uncovered: dict[int, str] = {}
        self._driven: dict[int, driven.Driven] = {}
        self._reading = ExitStack()
        self._proofs: list[Proof] = []
        self._shares: dict[int, list[Kept]] = {}  # of the arena
        self._claimed: list[ArenaFile] = []
        self._filling: Background | None = None
        self._arrival: Arrival | None = None

    def handle(self, job: MoverJob, call: JobCall) -> JobDone:
        """Do a job, one at a time. Raises a VramError."""
        self._call = call
        try:
            return self._do(job)
        except InjectionFailed as error:
            raise DataPathRefused(str(error)) from error
        except OSError as error:
            raise VramError(str(error)) from error

    def _do(self, job: MoverJob) -> JobDone:
        match job:
            case Watch():
                return job.done_by(self.watch)
            case Prefault():
                return job.done_by(self.prefault)
            case Compare():
                return job.done_by(self.compare)
            case EndWatch():
                return job.done_by(self.end_watch)
            case Save():
                return job.done_by(self.save)
            case ReadAhead():
                return job.done_by(self.read_ahead)
            case Load():
                return job.done_by(self.load)
            case Prove():
                return job.done_by(self.prove)
            case PutBack():
                return job.done_by(self.put_back)
            case CloseFiles():
                return job.done_by(self.close_files)
            case HoldArena():
                return job.done_by(self.hold_arena)
            case SaveArena():
                return job.done_by(self.save_arena)
            case ClaimArena():
                return job.done_by(self.claim_arena)
            case LoadArena():
                return job.done_by(self.load_arena)
            case HandOver():
                return job.done_by(self.hand_over)
            case AwaitArena():
                return job.done_by(lambda _: self.await_arena())
            case Release():
                return job.done_by(self.release)
        assert_never(job)

    def watch(self, job: Watch) -> None:
        image = job.files.directory
        in_memory = image.is_dir() and lies_in_memory(image)
        allowance = driven.MemoryAllowance(job.vram_bytes)
        how = self._how(job.files)
        with self._holding(job.seconds) as holds:
            for pid in job.pids:
                held = holds.enter_context(SeizedProcess(pid, spare=_drivers_threads(pid), seconds=HOLD_SECONDS))
                self._before[pid] = read_maps(pid)
                holds.callback(self._cover, held, shared_mappings(pid))
                path = image / file_name(job.names[pid], 0)
                if in_memory and (one := driven.offer(held, path, how, allowance, job.expected)) is not None:
                    self._driven[pid] = one
                    holds.callback(driven.settle, one, held)
                elif job.huge:
                    self._prefault(holds, pid, held.spared, how.threads)

    def prefault(self, job: Prefault) -> None:
        threads = _options(job.threads).threads
        with self._holding(job.seconds) as holds:
            for pid in job.pids:
                self._prefault(holds, pid, threads_named(pid, _drivers_threads(pid)), threads)

    def _prefault(self, holds: ExitStack, pid: int, tids: list[int], threads: int) -> None:
        if (one := prefaulting(pid, tids, threads, seconds=HOLD_SECONDS)) is not None:
            holds.callback(one.end)

    @contextmanager
    def _holding(self, seconds: float) -> Iterator[ExitStack]:
        """Collect what is to be released, at the latest after `seconds`, or immediately if the body fails."""
        assert self._holds is not None
        self._expiry = threading.Timer(seconds, self._release)
        self._expiry.daemon = True
        try:
            yield self._holds
        except BaseException:
            self._release()
            raise
        self._expiry.start()

    def compare(self, job: Compare) -> Compared:
        try:
            found = {pid: appeared(before, read_maps(pid)) for pid, before in self._before.items()}
        finally:
            held = self._release()
        if not held:
            text = f"the driver took longer than {self._expiry.interval:g} s, and the threads were released"
            raise VramError(text)
        self._found = found
        taken = {pid: one.region for pid, one in self._driven.items() if one.region is not None}
        self._driven = {pid: self._driven[pid] for pid in taken}
        sizes = {pid: sum(region.size for region in found) for pid, found in self._found.items()}
        return Compared(sizes, taken, self._uncovered)

    def _cover(self, held: SeizedProcess, before: list[Span]) -> None:
        """Cover what the driver has taken away before the threads resume."""
        try:
            cover(held, before)
        except (InjectionFailed, OSError) as error:
            self._uncovered[held.pid] = str(error)

    def end_watch(self, job: EndWatch) -> None:
        self._release()

    def _release(self) -> bool:
        """Release the threads; return whether they had been held until now."""
        with self._letting_go:
            held, self._holds = self._holds, None
            if held is not None:
                held.close()
        return held is not None

    def save(self, job: Save) -> dict[int, list[SavedRegion]]:
        how, done = self._how(job.files), 0
        saved: dict[int, list[SavedRegion]] = {}
        for pid, regions in self._found.items():
            announce = partial(self._announce, pid)
            saved[pid] = []
            if (one := self._driven.get(pid)) is not None:
                saved[pid].append(driven.take_away(one, announce, self._counting(how, done)))
                done += one.size
            files = [file_name(job.names[pid], number + len(saved[pid])) for number in range(len(regions))]
            saved[pid] += move_out(pid, regions, job.files.directory, files, announce, self._counting(how, done))
            done += sum(region.size for region in regions)
        return saved

    def _announce(self, pid: int, part: SavedRegion) -> None:
        self._call.tell(Dropping(pid, part))

    def read_ahead(self, job: ReadAhead) -> None:
        image, how = job.files.directory, replace(self._how(job.files), cancel=self._proving)
        mapped: list[SavedRegion] = []
        with suppress(VramError):  # which `load` will find, too
            mapped = mappable(job.regions, image)
            self._proofs = [Proof(mapped, image, how)]
        self._reading.enter_context(FilePrefetch([one for one in job.regions if one not in mapped], image, how))

    def load(self, job: Load) -> None:
        self._reading.close()
        done, how, image = 0, self._how(job.files), job.files.directory
        proving = replace(how, threads=min(how.threads, PROOF_THREADS), cancel=self._proving)
        for pid, saved in job.regions.items():
            self._await(mappable(saved, image), how)
            mapped = map_in(pid, saved, image)
            if late := [one for one in mapped if not any(one.file in proof.files for proof in self._proofs)]:
                self._proofs.append(Proof(late, image, proving))
            load(pid, [one for one in saved if one not in mapped], image, self._counting(how, done))
            done += total_bytes(saved)

    def prove(self, job: Prove) -> None:
        self._call.when_cancelled(self._proving)
        for proof in self._proofs:
            proof.require()

    def put_back(self, job: PutBack) -> None:
        """Raise a failure after the other processes have their bytes; NotTakenAway only if nothing is missing."""
        failures: list[VramError] = []
        image, how = job.files.directory, self._how(job.files)
        for pid, announced in job.regions.items():
            try:
                saved = [driven.made_private(pid, one, image) for one in announced]
                for first in range(0, len(saved), OPEN_FILES):
                    put_back(pid, saved[first : first + OPEN_FILES], image, how)
            except TargetGone:
                continue  # a process that has ended needs no bytes
            except VramError as error:
                failures.append(error)
        if failures:
            raise min(failures, key=lambda error: isinstance(error, NotTakenAway))

    def close_files(self, job: CloseFiles) -> None:
        for pid in job.pids:
            with suppress(TargetGone):
                driven.close_files(pid, job.directory)

    def hold_arena(self, job: HoldArena) -> None:
        self._shares = in_arena.hold(Memory(0), job.pids)

    def save_arena(self, job: SaveArena) -> list[ArenaFile]:
        how, done, found = self._how(job.files), 0, []
        for pid, kept in self._shares.items():
            path = job.files.directory / in_arena.file_name(job.names[pid])
            found.append(in_arena.save(Memory(0), kept, path, self._counting(how, done), pid=job.names[pid]))
            done += found[-1].size
        in_arena.let_go(Memory(0))
        return found

    def claim_arena(self, job: ClaimArena) -> None:
        """Pids are those in the container here, since there are no others yet."""
        self._claimed = job.files
        shares = in_arena.claim(Memory(job.arena, share=job.share), job.files, job.near)
        self._shares = {file.pid: share for file, share in zip(job.files, shares, strict=True)}

    def load_arena(self, job: LoadArena) -> None:
        shares = list(self._shares.values())
        how = replace(self._how(job.files), cancel=self._proving)
        self._filling = Background(
            lambda: in_arena.load(Memory(0), self._claimed, shares, job.files.directory, how), name="arena-load"
        )

    def await_arena(self) -> None:
        assert self._filling is not None
        self._call.when_cancelled(self._proving)
        self._filling.require()

    def hand_over(self, job: HandOver) -> None:
        in_arena.hand_over(Memory(0), {job.pids[name]: share for name, share in self._shares.items()})

    def release(self, job: Release) -> list[ReleaseResult]:
        from concurrent.futures import ThreadPoolExecutor  # here: few operations need it, and all wait for imports

        until = time.monotonic() + job.seconds
        wanted, cancelled = frozenset(job.majors), self._call.cancelled

        def one(heir: Inheritor) -> ReleaseResult:
            if expired():
                return ReleaseResult(heir.pid, kept="the deadline for all of them passed before its turn")
            try:
                given = release(heir, job.owners, wanted, seconds=HOLD_SECONDS, expired=expired)
                return ReleaseResult(heir.pid, given)
            except (Refused, InjectionFailed, OSError) as error:
                return ReleaseResult(heir.pid, kept=plain(str(error)))

        def expired() -> bool:
            return cancelled.is_set() or time.monotonic() > until

        with ThreadPoolExecutor(RELEASING_THREADS) as several:
            return list(several.map(one, job.heirs))

    def _how(self, files: ImageFiles) -> CopyOptions:
        how = replace(_options(files.threads), cancel=self._call.cancelled)
        if files.arriving and self._arrival is None:
            self._arrival = arrival_in(files.directory)
        arrival = self._arrival if files.arriving else None
        return replace(how, pool=files.pool, digest=files.digest, arrival=arrival, key=files.key)

    def _await(self, saved: Sequence[SavedRegion], how: CopyOptions) -> None:
        """Wait until files that are to be mapped are there: the process would find zeros in place of missing bytes."""
        if how.arrival is not None:
            for region in saved:
                how.arrival.wait_whole(region.file, how.cancel.is_set)

    def _counting(self, how: CopyOptions, before: int) -> CopyOptions:
        return replace(how, on_progress=lambda done: self._report(before + done))

    def _report(self, done: int) -> None:
        if (now := time.monotonic()) - self._told >= PROGRESS_SECONDS:
            self._told = now
            self._call.report(done)


def _options(threads: int) -> CopyOptions:
    return CopyOptions(threads=threads) if threads else CopyOptions()


def _drivers_threads(pid: int) -> Callable[[str], bool]:
    """Return what identifies the driver's threads by name; a program of such a name hands it to its own threads."""
    try:
        program = comm_of(pid)
    except ProcessLookupError:
        program = ""
    return lambda thread: thread.startswith(DRIVER_THREADS) and thread != program
