"""Transparent huge pages for the driver's host copy, made while a CUDA checkpoint runs.

The driver maps the copy and fills it in one call, with small pages unless something asks for huge ones:

    off      nothing is done (measured with 16 GiB: 8.4 s out and 2.6 s back, instead of 5.0 and 2.0)
    process  the driver's mapping is caught while it is made, and advised before it is filled: `vram.prefault` does that
    node     set the node's switch to "always" for the duration: every program that faults memory meanwhile is affected

Tried and of no use: to advise a mapping once it is seen in the process's map. The driver faults it in as soon as it has
it, and the advice has to wait for the lock that it holds meanwhile: after 13 GiB, 2 MiB were huge (H100, 580.159.04).
Rejected: prctl (PR_SET_THP_DISABLE and its PR_THP_DISABLE_EXCEPT_ADVISED can only forbid, up to Linux 6.18), memory
cgroups (they have no such setting), process_madvise (takes no MADV_HUGEPAGE for another process).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kybernate_shim.linux.private import make_directory, write_private

Mode = Literal["off", "process", "node"]
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STATE = Path("/run/kybernate/huge-pages")


class HugePagesUnavailable(Exception):
    """The node's switch is not there or cannot be written; nothing was changed."""


@contextmanager
def huge_pages(mode: Mode) -> Iterator[None]:
    """Set the node's switch for as long as the context lasts, if `mode` says so. Raises HugePagesUnavailable."""
    if mode != "node":
        yield
        return
    with node_wide():
        yield


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
        make_directory(state)
        with _gate(state):
            _restore_if_unused(switch, state)
            previous = state / "previous"
            if _selected(switch) == "never":
                raise HugePagesUnavailable(f"{switch} says never, which whoever has set it will have a reason for")
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
    write_private(draft, text)
    draft.replace(path)
