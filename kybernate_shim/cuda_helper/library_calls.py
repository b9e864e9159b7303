"""What the helper itself asks of the preload library in a program, in a thread of its own and with a deadline.

A query of a process may have to wait for that process, and a tenant's process may cause such waits deliberately.
Nothing here waits in the event loop, or in threads that other jobs need.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

from kybernate_shim.arena import control
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.errors import Busy
from kybernate_shim.linux.own_thread import in_own_thread

GRACE_SECONDS = 5.0  # for a query of a process, and for what should have ended by its own deadline
SHUT_SECONDS = 0.2  # in which allocations that were begun may end before the driver locks the process
PROBE_SECONDS = 0.5  # in which a library answers that waits for no lock
LOOK_SECONDS = 0.0005  # between two queries whether they have
UNDO_SECONDS = 10.0  # for each verb that undoes something


async def has_library(pid: int) -> bool:
    """Return whether the library is loaded; the driver offloads a process that cannot be queried."""
    try:
        return await in_own_thread(partial(control.is_there, pid), GRACE_SECONDS)
    except (OSError, TimeoutError):
        return False


async def shut(pid: int) -> None:
    """Keep a program from beginning an allocation for a moment."""
    with suppress(TimeoutError):
        await in_own_thread(partial(_shut_now, pid), SHUT_SECONDS + GRACE_SECONDS)


async def can_work(pid: int) -> bool:
    """Return whether no stopped thread of a process has a lock of the heap, without which nothing works in it.

    Other faults of the library show at the next request. A library that still works on an earlier request, because the
    driver is locked, answers when that is unlocked.
    """
    try:
        return await in_own_thread(partial(_answers, pid), PROBE_SECONDS + GRACE_SECONDS)
    except TimeoutError:
        return False


async def in_one_place(pid: int, memory: Memory) -> bool:
    """Undo what has been begun with the blocks of a process; return whether all of them are in VRAM then."""
    try:
        return await in_own_thread(partial(_undone, pid, memory), 4 * UNDO_SECONDS + GRACE_SECONDS)
    except (TimeoutError, OSError, Busy, control.ControlUnusable):
        return False


def _shut_now(pid: int) -> None:
    """Have the library keep threads from allocating, and wait for those that are in an allocation.

    This is only for speed: faults show when the memory is requested, and older libraries cannot do this.
    """
    until = time.monotonic() + SHUT_SECONDS
    with suppress(control.ControlUnusable, OSError):
        if page := control.control_of(pid):
            with page:
                while _in_allocation(page) and time.monotonic() < until:
                    time.sleep(LOOK_SECONDS)


def _answers(pid: int) -> bool:
    with suppress(control.ControlUnusable, control.ControlFailed, OSError):
        if page := control.control_of(pid):
            with page:
                try:
                    if page.unanswered in (None, control.Verb.PROBE):
                        page.ask(control.Verb.PROBE, seconds=PROBE_SECONDS)
                except control.ControlUnusable:
                    return False
    return True


def _in_allocation(page: control.Control) -> bool:
    try:
        page.ask(control.Verb.SHUT, seconds=SHUT_SECONDS)
    except control.ControlFailed as error:
        return error.busy
    return False


def _undone(pid: int, memory: Memory) -> bool:
    """Have the library undo what no job will finish, and return whether no block is away.

    Nothing is lost by that: what was handed out is still in VRAM, and what was made new is still in the arena.
    """
    page = control.control_of(pid)
    if page is None:
        return False
    with page, memory.using(ArenaOwner.of(pid), UNDO_SECONDS):
        for verb in (control.Verb.CLOSE, control.Verb.FORGET, control.Verb.DISCARD):
            with suppress(control.ControlFailed):
                page.ask(verb, seconds=UNDO_SECONDS)
        return not any(block.state in control.NOT_IN_VRAM for block in page.blocks())
