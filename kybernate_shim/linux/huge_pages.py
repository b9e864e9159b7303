"""Transparent huge pages for the driver's host copy, made while a CUDA checkpoint runs.

The driver maps the copy and fills it in one call, with small pages unless something asks for huge ones:

    off      nothing is done (measured with 16 GiB: 8.4 s out and 2.6 s back, instead of 5.0 and 2.0)
    process  the driver's mapping is caught while it is made, and advised before it is filled: `vram.prefault` does that
    node     set the node's switch to "always" for the duration: every program that faults memory then is affected

Tried without success: advising a mapping once it appears in the process's map. The driver faults it in as soon as it
has it, and the advice has to wait for the lock that it holds meanwhile: after 13 GiB, 2 MiB were huge (H100,
580.159.04). Rejected: prctl (PR_SET_THP_DISABLE and its PR_THP_DISABLE_EXCEPT_ADVISED can only forbid, up to Linux
6.18), memory cgroups (they have no such setting), process_madvise (takes no MADV_HUGEPAGE for another process).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

from kybernate_shim.errors import Refused
from kybernate_shim.linux.atomic_write import replace_file
from kybernate_shim.linux.locks import held, lock_file, try_lock_file
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.run_directory import RUN

Mode = Literal["off", "process", "node"]
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STATE = RUN / "huge-pages"


@contextmanager
def huge_pages(mode: Mode) -> Iterator[None]:
    """Set the node's switch for as long as the context lasts, if `mode` says so. Raises Refused."""
    if mode != "node":
        yield
        return
    with node_wide():
        yield


@contextmanager
def node_wide(switch: Path = SWITCH, state: Path = STATE) -> Iterator[None]:
    """Keep the node's switch at "always"; the last user, in any process, restores the value that the first one found.

    A user that is killed stops counting, and the next one to come or go restores: `restore_node` is for that. A switch
    that another program has set in the meantime is left unchanged. Raises Refused.
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
    """Return the descriptor that makes us a user: a lock that the kernel releases when we die."""
    try:
        make_directory(state)
        with _gate(state):
            _restore_if_unused(switch, state)
            previous = state / "previous"
            if _selected(switch) == "never":
                raise Refused(f"{switch} is set to never, which Kybernate does not override")
            if not previous.exists():
                replace_file(previous, _selected(switch))  # half a word would not be a setting
            switch.write_text("always")
            return lock_file(state / "users", shared=True)
    except OSError as error:
        raise Refused(f"{switch} cannot be set: {error.strerror}") from error


def _gate(state: Path) -> AbstractContextManager[bool]:
    """Let one process at a time come or go."""
    return held(lock_file(state / "gate"))


def _restore_if_unused(switch: Path, state: Path) -> bool:
    previous = state / "previous"
    if not previous.exists() or _in_use(state):
        return False
    if _selected(switch) == "always":
        switch.write_text(previous.read_text())
    previous.unlink()
    return True


def _in_use(state: Path) -> bool:
    with held(try_lock_file(state / "users")) as unused:
        return not unused


def _selected(switch: Path) -> str:
    """Return the word in brackets of `always [madvise] never`; a plain word is itself."""
    text = switch.read_text()
    return text.partition("[")[2].partition("]")[0] or text.strip()
