"""The log events of the helper's calls: a call `lock` is logged as `cuda.locked`, a job `take` as `arena.taken`."""

from __future__ import annotations

from typing import Final

PARTICIPLES: Final = {  # the keys are the verbs of the driver and of the arena's worker
    "lock": "locked",
    "checkpoint": "checkpointed",
    "restore": "restored",
    "unlock": "unlocked",
    "warm": "warmed",
    "expect": "expected",
    "take": "taken",
    "copy": "copied",
    "finish": "finished",
    "prefetch": "prefetched",
    "give": "given",
    "drop": "dropped",
    "settle": "settled",
}


def event_of(noun: str, verb: str) -> str:
    """Return the event of a finished call, such as `arena.taken`."""
    return f"{noun}.{PARTICIPLES[verb]}"
