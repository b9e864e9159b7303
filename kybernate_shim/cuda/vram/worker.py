"""The process that moves VRAM bytes for a shim: it holds, compares, copies and drops, one job after the other.

Not the shim itself, because a tracer must not wait for any child, as a shim's reaper does, and because the copies keep
an interpreter busy. It reads jobs from the socket that it inherits and answers them, both as lines of JSON; it ends
with its shim, and the kernel then lets go of whatever it held. Started as `python -m` with the socket's descriptor.

Job:    {"do": "save", ...}, see `Desk`; {"do": "cancel"} ends the job that runs
Answer: {"done": ...} or {"failed": "RegionChanged", "text": "why"}, after any number of {"progress": bytes} and of
        {"dropping": pid, "part": a SavedRegion}
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from kybernate_shim.cuda.arena import saved as in_arena
from kybernate_shim.cuda.arena.extents import Kept
from kybernate_shim.cuda.arena.memory import Memory
from kybernate_shim.cuda.arena.saved import SavedBlocks
from kybernate_shim.cuda.regions import appeared
from kybernate_shim.cuda.release import Heir, NotReleased, release
from kybernate_shim.cuda.vram import driven
from kybernate_shim.cuda.vram.crew import Transfer
from kybernate_shim.cuda.vram.digest import KIND
from kybernate_shim.cuda.vram.errors import HoldExpired, HoldRefused, NotTakenAway, TargetGone, VramError
from kybernate_shim.cuda.vram.files import lies_in_memory
from kybernate_shim.cuda.vram.load import Prefetch, Proof, load, map_in, mappable, put_back
from kybernate_shim.cuda.vram.prefault import prefaulting
from kybernate_shim.cuda.vram.save import move_out
from kybernate_shim.cuda.vram.saved import SavedRegion, file_name, total_bytes
from kybernate_shim.linux.memory import Region, read_maps
from kybernate_shim.linux.ptrace import Held, threads_named
from kybernate_shim.linux.tracee import InjectionFailed

Send = Callable[[dict[str, Any]], None]
DRIVER_THREADS = "cuda"  # begins the names of the driver's own threads, which must go on for its calls to be answered
HOLD_SECONDS = 5.0
PROGRESS_SECONDS = 0.1
PROOF_THREADS = 4  # beside the driver, which is done in 2.7 s then, and in 3.5 s beside 16 (17 GiB, H100)
RELEASING_THREADS = 8  # each waits for its process most of the time
OPEN_FILES = 64  # each part of a region opens its file


class Desk:
    """The jobs, each a method; pids are the host's, processes are told apart by `names`, their pids in the container.

    `watch` and `compare` enclose the driver's checkpoint, `save` follows for what was found, `put_back` undoes it;
    `hasten` and `let_go` enclose one that moves nothing out of the process;
    `release` makes processes without CUDA state such that CRIU can dump them.
    `prefetch`, `load` and `prove` are for a restore. `hold_arena`, `save_arena`, `claim_arena`, `load_arena` and
    `hand_over` are for what is not in the processes but in the node's arena.
    """

    def __init__(self, send: Send) -> None:
        self.cancel = threading.Event()
        self._send = send
        self._told = 0.0
        self._letting_go = threading.Lock()
        self._holds: ExitStack | None = ExitStack()
        self._expiry = threading.Timer(0, self._release)
        self._before: dict[int, list[Region]] = {}
        self._found: dict[int, list[Region]] = {}
        self._driven: dict[int, driven.Driven] = {}
        self._reading = ExitStack()
        self._proofs: list[Proof] = []
        self._shares: dict[int, list[Kept]] = {}  # of the arena
        self._claimed: list[SavedBlocks] = []

    def watch(
        self,
        *,
        pids: list[int],
        seconds: float,
        directory: str,
        names: dict[str, int],
        threads: int,
        huge: bool,
        pool: str = "",
        digest: str = KIND,
        expected: int = 0,
        told: int = 0,
    ) -> None:
        """Stop all threads but the driver's, so that what appears in the maps from now on is the driver's alone.

        Where `directory` is in memory, the driver is offered files there, for what it is about to move: some
        `expected` bytes of each process, `told` of all of them, 0 where that is not known. Else, if `huge`, its memory
        is made of huge pages. After `seconds` all threads are let go, whatever happens.
        """
        image = Path(directory)
        in_memory = image.is_dir() and lies_in_memory(image)
        allowance = driven.Allowance(told)
        with self._holding(seconds) as holds:
            for pid in pids:
                held = holds.enter_context(Held(pid, spare=_drivers_threads(pid), seconds=HOLD_SECONDS))
                self._before[pid] = read_maps(pid)
                path = image / file_name(names[str(pid)], 0)
                how = self._how(threads, pool, digest)
                if in_memory and (one := driven.offer(held, path, how, allowance, expected)) is not None:
                    self._driven[pid] = one
                    holds.callback(driven.settle, one, held)
                elif huge:
                    self._prefault(holds, pid, held.spared, threads)

    def hasten(self, *, pids: list[int], seconds: float, threads: int) -> None:
        """Make the memory that the driver is about to ask for of huge pages, until `let_go`."""
        with self._holding(seconds) as holds:
            for pid in pids:
                self._prefault(holds, pid, threads_named(pid, _drivers_threads(pid)), threads)

    def _prefault(self, holds: ExitStack, pid: int, tids: list[int], threads: int) -> None:
        if (one := prefaulting(pid, tids, self._how(threads).threads, seconds=HOLD_SECONDS)) is not None:
            holds.callback(one.end)

    @contextmanager
    def _holding(self, seconds: float) -> Iterator[ExitStack]:
        """Collect what is to be let go of, at the latest after `seconds`, or at once if the body fails."""
        assert self._holds is not None
        self._expiry = threading.Timer(seconds, self._release)
        self._expiry.daemon = True
        try:
            yield self._holds
        except BaseException:
            self._release()
            raise
        self._expiry.start()

    def compare(self) -> dict[str, dict[int, Any]]:
        """Find the regions that have appeared, let the threads go, and return the "found" bytes by pid.

        What the driver has put into files is "driven": a region by pid that has no digest yet.
        """
        try:
            found = {pid: appeared(before, read_maps(pid)) for pid, before in self._before.items()}
        finally:
            held = self._release()
        if not held:
            text = f"the driver took longer than {self._expiry.interval:g} s, and the threads were let go"
            raise HoldExpired(text)
        self._found = found
        taken = {pid: one.region for pid, one in self._driven.items() if one.region is not None}
        self._driven = {pid: self._driven[pid] for pid in taken}
        return {
            "found": {pid: sum(region.size for region in regions) for pid, regions in self._found.items()},
            "driven": {pid: asdict(region) for pid, region in taken.items()},
        }

    def let_go(self) -> None:
        """Undo `watch` or `hasten`."""
        self._release()

    def _release(self) -> bool:
        """Let go of the threads; return whether they had been held until now."""
        with self._letting_go:
            held, self._holds = self._holds, None
            if held is not None:
                held.close()
        return held is not None

    def save(
        self, *, directory: str, names: dict[str, int], threads: int, pool: str = "", digest: str = KIND
    ) -> dict[int, list[dict[str, Any]]]:
        """Move what `compare` has found into files of `directory`; each part is announced before it is dropped.

        After a failure the files stay, for `put_back` of the parts.
        """
        how, done = self._how(threads, pool, digest), 0
        saved: dict[int, list[SavedRegion]] = {}
        for pid, regions in self._found.items():
            announce = partial(self._announce, pid)
            saved[pid] = []
            if (one := self._driven.get(pid)) is not None:
                saved[pid].append(driven.take_away(one, announce, self._counting(how, done)))
                done += one.size
            files = [file_name(names[str(pid)], number + len(saved[pid])) for number in range(len(regions))]
            saved[pid] += move_out(pid, regions, Path(directory), files, announce, self._counting(how, done))
            done += sum(region.size for region in regions)
        return {pid: [asdict(region) for region in listed] for pid, listed in saved.items()}

    def _announce(self, pid: int, part: SavedRegion) -> None:
        self._send({"dropping": pid, "part": asdict(part)})

    def prefetch(self, *, directory: str, files: list[dict[str, Any]], threads: int) -> None:
        """Begin to read files into the page cache, and to prove those in memory; go on while other work is done."""
        wanted, image = [SavedRegion(**file) for file in files], Path(directory)
        self._reading.enter_context(Prefetch(wanted, image, self._how(threads)))
        with suppress(VramError):  # which `load` will find, too
            self._proofs = [Proof(mappable(wanted, image), image, self._how(threads))]

    def load(self, *, directory: str, regions: dict[str, list[dict[str, Any]]], threads: int) -> None:
        """Fill the regions of each process, by mapping what is in memory; `prove` has to follow."""
        self._reading.close()
        done, how = 0, self._how(threads)
        for pid, saved in _by_pid(regions):
            mapped = map_in(pid, saved, Path(directory))
            if late := [one for one in mapped if not any(one.file in proof.files for proof in self._proofs)]:
                self._proofs.append(Proof(late, Path(directory), replace(how, threads=min(how.threads, PROOF_THREADS))))
            load(pid, [one for one in saved if one not in mapped], Path(directory), self._counting(how, done))
            done += total_bytes(saved)

    def prove(self) -> None:
        """Check the digests of what `load` has only mapped. The driver may use it already."""
        for proof in self._proofs:
            proof.require()

    def put_back(self, *, directory: str, regions: dict[str, list[dict[str, Any]]], threads: int) -> None:
        """Undo `save`, also of what has no digest because it was never taken away; nothing may cancel it.

        What fails for one process is raised after the others have got theirs; NotTakenAway only if nothing is missing.
        """
        failures: list[VramError] = []
        for pid, announced in _by_pid(regions):
            try:
                saved = [driven.made_private(pid, one, Path(directory)) for one in announced]
                for first in range(0, len(saved), OPEN_FILES):
                    put_back(pid, saved[first : first + OPEN_FILES], Path(directory), self._how(threads))
            except TargetGone:
                continue  # who has ended needs no bytes
            except VramError as error:
                failures.append(error)
        if failures:
            raise min(failures, key=lambda error: isinstance(error, NotTakenAway))

    def close_files(self, *, pids: list[int], directory: str) -> None:
        """Take the files of `directory` from processes that a worker which was killed has given them to."""
        for pid in pids:
            with suppress(TargetGone):
                driven.close_files(pid, Path(directory))

    def hold_arena(self, *, pids: list[int]) -> None:
        """Keep what the arena has of processes there, for `save_arena`, although they may end before."""
        self._shares = in_arena.hold(Memory(0), pids)

    def save_arena(
        self, *, directory: str, names: dict[str, int], threads: int, pool: str = "", digest: str = KIND
    ) -> dict[int, dict[str, Any]]:
        """Copy what is held into files of `directory`, and let go of it."""
        how, done, found = self._how(threads, pool, digest), 0, {}
        for pid, kept in self._shares.items():
            path = Path(directory, in_arena.file_name(names[str(pid)]))
            found[pid] = in_arena.save(Memory(0), kept, path, self._counting(how, done))
            done += found[pid].size
        in_arena.let_go(Memory(0))
        return {pid: asdict(one) for pid, one in found.items()}

    def claim_arena(self, *, blocks: dict[str, dict[str, Any]], arena: list[Any], share: float, near: int) -> None:
        """Find room for files of an image in the arena, of so many bytes on each node; `load_arena` has to follow.

        They get at most a `share` of it. Pids are the container's here, for there are no others yet.
        """
        self._claimed = [
            SavedBlocks(**{**one, **{name: tuple(map(tuple, one[name])) for name in ("blocks", "holes")}})
            for one in blocks.values()
        ]
        memory = Memory(tuple((node, size) for node, size in arena), share=share)
        shares = in_arena.claim(memory, self._claimed, near)
        self._shares = dict(zip(map(int, blocks), shares, strict=True))

    def load_arena(self, *, directory: str, threads: int) -> None:
        """Fill what was claimed from the files, which are in `directory`; `hand_over` has to follow."""
        in_arena.load(Memory(0), self._claimed, list(self._shares.values()), Path(directory), self._how(threads))

    def hand_over(self, *, pids: dict[str, int]) -> None:
        """Give what `load_arena` has filled to the restored processes, `pids` from the container's to the host's."""
        in_arena.hand_over(Memory(0), {pids[str(name)]: share for name, share in self._shares.items()})

    def release(
        self, *, heirs: list[dict[str, Any]], owners: list[int], majors: list[tuple[int, int]], seconds: float
    ) -> list[dict[str, Any]]:
        """Have processes give up what they have inherited of the devices `majors`; for each a Given or why not."""
        until = time.monotonic() + seconds
        wanted = frozenset((kind, major) for kind, major in majors)

        def one(heir: dict[str, Any]) -> dict[str, Any]:
            try:
                who = Heir(**{**heir, "inherited": frozenset(heir["inherited"])})
                return {"given": asdict(release(who, owners, wanted, seconds=HOLD_SECONDS, expired=expired))}
            except (NotReleased, InjectionFailed, OSError) as error:
                return {"pid": heir["pid"], "kept": str(error)}

        def expired() -> bool:
            return self.cancel.is_set() or time.monotonic() > until

        with ThreadPoolExecutor(RELEASING_THREADS) as several:
            return list(several.map(one, heirs))

    def _how(self, threads: int, pool: str = "", digest: str = KIND) -> Transfer:
        how = Transfer(cancel=self.cancel, pool=Path(pool) if pool else None, digest=digest)
        return replace(how, threads=threads) if threads else how

    def _counting(self, how: Transfer, before: int) -> Transfer:
        return replace(how, on_progress=lambda done: self._tell(before + done))

    def _tell(self, done: int) -> None:
        if (now := time.monotonic()) - self._told >= PROGRESS_SECONDS:
            self._told = now
            self._send({"progress": done})


def _by_pid(regions: dict[str, list[dict[str, Any]]]) -> list[tuple[int, list[SavedRegion]]]:
    return [(int(pid), [SavedRegion(**one) for one in listed]) for pid, listed in regions.items()]


def _drivers_threads(pid: int) -> Callable[[str], bool]:
    """Return what tells the driver's threads by their names; a program of such a name hands it to its own threads."""
    try:
        program = Path(f"/proc/{pid}/comm").read_text(errors="replace").removesuffix("\n")
    except (FileNotFoundError, ProcessLookupError):
        program = ""
    return lambda thread: thread.startswith(DRIVER_THREADS) and thread != program


def main() -> None:
    """Serve jobs until the shim closes its end."""
    # Whoever ends us in the middle of a call that we make in another process may end that process with us.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    connection = socket.socket(fileno=int(sys.argv[1]))
    writing = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with writing:
            connection.sendall(json.dumps(message).encode() + b"\n")

    desk = Desk(send)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(desk, jobs, send), daemon=True).start()
    try:
        for line in connection.makefile("rb"):
            job = json.loads(line)
            if job["do"] == "cancel":
                desk.cancel.set()
            else:
                desk.cancel.clear()  # one that came after its job was done is not meant for the next
                jobs.put(job)
    except OSError:
        pass  # the shim is gone
    os._exit(0)  # nobody is left to tell of a job that still runs; the kernel lets go of what is held


def _work(desk: Desk, jobs: queue.SimpleQueue[dict[str, Any]], send: Send) -> None:
    while True:
        job = jobs.get()
        try:
            send({"done": getattr(desk, job.pop("do"))(**job)})
        except InjectionFailed as error:
            send({"failed": HoldRefused.__name__, "text": str(error)})
        except (VramError, OSError) as error:
            send({"failed": type(error).__name__, "text": str(error)})
        except BaseException:  # noqa: BLE001  # the shim would wait for ever for a worker that has lost this thread
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


if __name__ == "__main__":
    main()
