"""What a move answers when something fails."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

from kybernate_shim.arena.control import ControlFailed, ControlUnusable
from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.cuda_worker.calls import DriverRefused
from kybernate_shim.errors import Busy, NoRoom
from kybernate_shim.linux.kernel_text import plain
from kybernate_shim.worker_protocol.cuda_jobs import MoveAnswer
from kybernate_shim.worker_protocol.messages import changed

OUT_OF_MEMORY = 2  # the driver's
FAILURES = (ControlFailed, ControlUnusable, DriverRefused, NoRoom, Busy, OSError)


def answered(work: Callable[[], MoveAnswer]) -> MoveAnswer:
    """Turn what a move raises into its answer, with its duration."""
    began = time.monotonic()
    try:
        answer = work()
    except FAILURES as error:
        answer = MoveAnswer(_refusal_of(error), plain(str(error)))
    except Exception as error:  # noqa: BLE001  # no process may end the worker, which others need
        traceback.print_exc()
        answer = MoveAnswer(ArenaRefusal.FAILED, plain(repr(error)))
    return changed(answer, seconds=time.monotonic() - began)


def _refusal_of(error: Exception) -> ArenaRefusal:
    if isinstance(error, NoRoom):
        return ArenaRefusal.FULL
    if isinstance(error, ControlFailed) and error.busy:
        return ArenaRefusal.BUSY
    if isinstance(error, ControlFailed) and error.code == OUT_OF_MEMORY:
        return ArenaRefusal.NO_ROOM
    if isinstance(error, ControlUnusable):
        return ArenaRefusal.LIBRARY  # the program's own doing, and no fault of the worker's
    return ArenaRefusal.FAILED
