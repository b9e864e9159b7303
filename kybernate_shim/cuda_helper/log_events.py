"""The log events of the helper: a call `lock` is logged as `cuda.locked`, a job `offload` as `arena.offloaded`."""

from __future__ import annotations

from typing import Final

PARTICIPLES: Final = {  # the keys are the verbs of the driver and of the arena's worker
    "lock": "locked",
    "checkpoint": "checkpointed",
    "restore": "restored",
    "unlock": "unlocked",
    "warm": "warmed",
    "expect": "expected",
    "offload": "offloaded",
    "copy": "copied",
    "finish": "finished",
    "prefetch": "prefetched",
    "drop": "dropped",
    "settle": "settled",
}


def event_of(noun: str, verb: str) -> str:
    """Return the event of a finished call, such as `arena.offloaded`."""
    return f"{noun}.{PARTICIPLES[verb]}"
