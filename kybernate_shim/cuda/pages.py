"""Transparent huge pages for the driver's host copy, made while a CUDA checkpoint runs.

The driver maps the copy and fills it in one call, with small pages unless something asks for huge ones. Ways to ask:

    off      nothing is done (measured with 16 GiB: 8.4 s out and 2.6 s back, instead of 5.0 and 2.0)
    process  watch the process's map during the call and advise each mapping that appears, by a call made in the process
             (ptrace): nothing outside the process changes, so this is the default
    node     set the node's switch to "always" for the duration: every program that faults memory meanwhile is affected

Rejected: prctl (PR_SET_THP_DISABLE and its PR_THP_DISABLE_EXCEPT_ADVISED can only forbid, up to Linux 6.18), memory
cgroups (they have no such setting), process_madvise (takes no MADV_HUGEPAGE for another process).
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from kybernate_shim.cuda.regions import appeared
from kybernate_shim.linux.memory import Region, read_maps
from kybernate_shim.linux.ptrace import advise_huge_pages
from kybernate_shim.linux.tracee import InjectionFailed

Mode = Literal["off", "process", "node"]
DEFAULT_MODE: Mode = "process"
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STATE = Path("/run/kybernate/huge-pages")
LOOK_SECONDS = 0.002  # at 2 GB/s the driver fills 4 MB in that time
ADVISE_SECONDS = 0.5  # a thread that does not stop by then is in the driver's hands


class HugePagesUnavailable(Exception):
    """The node's switch is not there or cannot be written; nothing was changed."""


@contextmanager
def huge_pages(mode: Mode, pids: Iterable[int]) -> Iterator[None]:
    """Have what the processes map meanwhile filled with huge pages, as far as `mode` allows.

    In mode "process" failures are silent: the copy is slower then. Raises HugePagesUnavailable in mode "node".
    """
    with ExitStack() as stack:
        if mode == "process":
            for pid in pids:
                stack.enter_context(Advisor(pid))
        elif mode == "node":
            stack.enter_context(node_wide())
        yield


class Advisor:
    """A thread that looks at a process's map every 2 ms and advises huge pages for each mapping that has appeared."""

    def __init__(self, pid: int) -> None:
        self.advised: list[Region] = []
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"huge-pages-{pid}")

    def __enter__(self) -> Advisor:
        try:
            self._known = read_maps(self._pid)
        except OSError:
            self._stop.set()  # the process is gone, which others notice as well
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                now = read_maps(self._pid)
                for region in appeared(self._known, now):
                    advise_huge_pages(self._pid, region.start, region.size, seconds=ADVISE_SECONDS)
                    self.advised.append(region)
            except (OSError, InjectionFailed):
                return  # gone, or traced by another: it does without
            self._known = now


# -- The node's switch ------------------------------------------------------------------------------------------------


@contextmanager
def node_wide(switch: Path = SWITCH, state: Path = STATE) -> Iterator[None]:
    """Keep the node's switch at "always"; the last of all users, in any process, sets it to what the first one found.

    A user that is killed stops counting, and the next one to come or go restores: `restore_node` is for that. A switch
    that somebody else has set meanwhile is left as it is. Raises HugePagesUnavailable.
    """
    users = _enter(switch, state)
    try:
        yield
    finally:
        with _gate(state):
            os.close(users)
            _restore_if_unused(switch, state)


def restore_node(switch: Path = SWITCH, state: Path = STATE) -> bool:
    """Undo what killed users have left behind; return whether there was anything. For the start of a service."""
    if not (state / "previous").exists():
        return False
    with _gate(state):
        return _restore_if_unused(switch, state)


def _enter(switch: Path, state: Path) -> int:
    """Return the descriptor that makes us a user: a lock that the kernel lets go of when we die."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _gate(state):
            _restore_if_unused(switch, state)
            previous = state / "previous"
            if not previous.exists():
                _write_durably(previous, _selected(switch))
            switch.write_text("always")
            users = os.open(state / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(users, fcntl.LOCK_SH)
            return users
    except OSError as error:
        raise HugePagesUnavailable(f"{switch} cannot be set: {error.strerror}") from error


@contextmanager
def _gate(state: Path) -> Iterator[None]:
    """Let one process at a time come or go."""
    gate = os.open(state / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)


def _restore_if_unused(switch: Path, state: Path) -> bool:
    previous = state / "previous"
    if not previous.exists() or _in_use(state):
        return False
    if _selected(switch) == "always":
        switch.write_text(previous.read_text())
    previous.unlink()
    return True


def _in_use(state: Path) -> bool:
    users = os.open(state / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(users)


def _selected(switch: Path) -> str:
    """Return the word in brackets of `always [madvise] never`; a plain word is itself."""
    text = switch.read_text()
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _write_durably(path: Path, text: str) -> None:
    """Write so that a crash leaves the whole file or none: half a word would be no setting."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)
