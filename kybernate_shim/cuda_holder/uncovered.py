"""A process that the driver checkpoints: its threads are stopped until memory covers what the driver takes away.

A program that polls its GPU would die otherwise: see `linux.ptrace.covers`. Its threads may have a lock that the driver
waits for, such as the heap's: then they continue for a moment. A process whose threads cannot be stopped, because a
debugger has them, is checkpointed all the same.

A thread of the holder handles each process, so that this does not depend on the helper, which may be killed.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

from kybernate_shim.arena.control import must_run
from kybernate_shim.linux.futex import NUMBERS
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.ptrace.covers import Span, cover, shared_mappings
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from kybernate_shim.linux.ptrace.tracee import InjectionFailed

STOP_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 0.05  # between two looks at what the driver's threads wait for; none waits so long otherwise
BREATH_SECONDS: Final = 0.005  # in which a thread leaves the heap; twice as long each time, for one that forks
LONGEST_SECONDS: Final = 0.08
BREATHS: Final = 16  # then they continue until the driver is done
FUTEX: Final = frozenset(str(number) for number in NUMBERS.values())
CONTENDED: Final = ("0x80", "0x2")  # FUTEX_WAIT_PRIVATE for 2, as for a mutex of glibc: nothing idle waits so


class UncoveredProcess:
    """Process `pid`, whose threads are stopped while `_held` is set.

    `by_caller`: the caller has stopped its threads, and covers it, unless it releases them before.
    """

    def __init__(self, pid: int, *, by_caller: bool = False) -> None:
        self.pid = pid
        self._by_caller = by_caller
        self._held: SeizedProcess | None = None
        self._before: list[Span] | None = None
        self._idle: set[str] = set()  # what the driver's threads wait for while they have nothing to do
        self._waits: set[str] = set()
        self._breaths = 0
        self._failure = ""
        self._stopped = threading.Event()
        self._over = threading.Event()
        self._attending = threading.Thread(target=self._attend, daemon=True)
        self._attending.start()

    def stopped(self, seconds: float) -> str:
        """Wait until the threads are stopped; return why they are not, "" where they are or the process has ended."""
        if not self._stopped.wait(seconds):
            return f"they did not stop within {seconds:g} s"
        return "" if has_ended(self.pid) else self._failure

    def begin_to_cover(self) -> None:
        """The driver is done with the process. `covered` has to follow."""
        self._over.set()

    def covered(self, seconds: float) -> str:
        """Wait until what was taken away is covered, and the threads resume; return what has failed."""
        self._attending.join(seconds)
        if self._attending.is_alive():
            return f"the kernel did not let it be covered within {seconds:g} s"
        return "" if has_ended(self.pid) else self._failure

    @property
    def continued(self) -> bool:
        """Whether its threads continued in the end, because the driver waited for a lock of theirs again and again."""
        return self._breaths >= BREATHS

    def _attend(self) -> None:
        """Keep the threads stopped until the driver is done, except where it could not work."""
        try:
            self._stop()
            self._stopped.set()
            while not (self._over.wait(LOOK_SECONDS) or has_ended(self.pid)):
                self._look()
            if not has_ended(self.pid):  # else its parent would wait for the release
                self._cover()
        except Exception as error:  # noqa: BLE001  # not foreseen: for the helper's log
            self._failure = repr(error)
        finally:
            self._stopped.set()
            self._let_go()

    def _stop(self) -> None:
        try:
            if self._before is None:
                self._before = shared_mappings(self.pid)
            held = SeizedProcess(self.pid, spare=must_run, seconds=STOP_SECONDS)
            held.__enter__()
        except (InjectionFailed, OSError) as error:
            self._failure = "" if self._by_caller else str(error) or repr(error)
            return
        self._failure = ""
        self._held = held
        self._waits = _waits(held)
        self._idle = {wait for wait in self._waits if not _is_for_mutex(wait)}

    def _look(self) -> None:
        """Stop the threads that others have released, and resume those that have what the driver waits for."""
        if self._held is None:
            if self._by_caller and self._breaths < BREATHS:
                self._stop()
            return
        before, self._waits = self._waits, _waits(self._held)
        if (self._waits & before) - self._idle:
            self._breathe()

    def _breathe(self) -> None:
        """Let the threads continue until they may have left what the driver waits for."""
        self._let_go()
        self._breaths += 1
        if self._breaths < BREATHS:
            time.sleep(min(BREATH_SECONDS * 2 ** (self._breaths - 1), LONGEST_SECONDS))
            self._stop()

    def _cover(self) -> None:
        if self._held is None and self._before is not None:
            self._stop()
        try:
            if self._held is not None:
                cover(self._held, self._before or ())
        except (InjectionFailed, OSError) as error:
            self._failure = str(error) or repr(error)

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)


def _waits(held: SeizedProcess) -> set[str]:
    """Return the waits for locks of the threads that were not stopped: thread, call, address and stack."""
    found = set()
    for tid in held.spared:
        try:
            call = Path(f"/proc/{held.pid}/task/{tid}/syscall").read_text()
        except OSError:
            continue
        if call.split(maxsplit=1)[0] in FUTEX:
            found.add(f"{tid} {call}")
    return found


def _is_for_mutex(wait: str) -> bool:
    """Return whether such a wait is for a mutex, or for the lock of the heap, which some other thread has."""
    _, _, _, *arguments = wait.split()
    return tuple(arguments[:2]) == CONTENDED
