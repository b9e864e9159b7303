"""Which faults there are: every call that an operation makes, by what may become of it.

A dry run records the calls. Each is made to fail in each of its ways the first time, in the middle and the last time
that the operation makes it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.fakes.cuda import Call

VERBS = ("state", "tid", "lock", "checkpoint", "restore", "unlock")
LIBRARY = "kybernate-arena"  # its thread
UNKNOWN, OUT_OF_MEMORY = "999", "2"
# Functions that need memory, of a GPU or of the host.
GREEDY = frozenset(
    [
        *("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAddressReserve", "cuMemImportFromShareableHandle"),
        *("cuMemAlloc_v2", "cuMemHostRegister_v2", "cuDevicePrimaryCtxRetain", "cuStreamCreate"),
        *("cuMemExportToShareableHandle", "cuModuleLoadData", "checkpoint", "restore"),
    ]
)
# Functions that the library in a program calls, also where it undoes something.
OF_PROGRAMS = frozenset(
    [
        *("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemExportToShareableHandle"),
        *("cuMemAddressReserve", "cuMemAddressFree", "cuMemGetAllocationGranularity"),
    ]
)
# What a fault is told by, in an error.
TOLD = {
    UNKNOWN: r"CUDA_ERROR_UNKNOWN|CUDA error 999",
    OUT_OF_MEMORY: r"OUT_OF_MEMORY|CUDA error 2\b|NO_ROOM",
    "crash": "SIGSEGV|has ended|gone",
    "kill": "SIGKILL|has ended|gone",
    "full": r"has room|No space left",
}


@dataclass(frozen=True)
class Fault:
    """What becomes of the `nth` call of `call`, of which a dry run had `of`.

    `who` makes it: "arena", the arena's worker; a program's name, the library in it; or, of a verb, "driver" with the
    name of the program that it is for. "daemon" NAME is who has made the operation, and is "killed" where the driver is
    about to be called for a program; "node" has something that is "full".
    """

    operation: str
    who: str
    call: str
    nth: int
    of: int
    what: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.who}: {self.call} {self.nth}/{self.of} {self.what}"

    @property
    def kind(self) -> tuple[str, str, str]:
        """What makes it another fault than others, in whichever operation: who makes the call, the call, the way."""
        return "program" if len(self.who) == 1 else self.who.partition(" ")[0], self.call, self.what

    @property
    def ends_program(self) -> str:
        """The name of the program that dies of it."""
        return self.who if len(self.who) == 1 and self.what in ("crash", "kill") else ""


def faults(operation: str, calls: Sequence[Call], names: dict[int, str], *, cold: bool = False) -> Iterator[Fault]:
    """Yield the faults of an operation by what a dry run of it has recorded; `names` are the programs' by pid.

    `cold`: the arena's worker is not known yet, so only of what no program calls.
    """
    for (who, call), count in sorted(Counter(sites(calls, names)).items()):
        if cold and (who != "arena" or call in OF_PROGRAMS):
            continue
        for nth in sorted({1, (count + 1) // 2, count}):
            for what in _ways(who, call):
                yield Fault(operation, who, call, nth, count, what)


def killed(operation: str, calls: Sequence[Call], names: dict[int, str]) -> Iterator[Fault]:
    """Yield the deaths of who does an operation: at each call of the driver for a program."""
    for (who, call), count in sorted(Counter(sites(calls, names)).items()):
        if who.startswith("driver "):
            for nth in sorted({1, (count + 1) // 2, count}):
                yield Fault(operation, f"daemon {who[-1]}", call, nth, count, "killed")


def shortages(operation: str, short_of: Iterable[str]) -> Iterator[Fault]:
    for what in short_of:
        yield Fault(operation, "node", what, 1, 1, "full")


def sites(calls: Sequence[Call], names: dict[int, str]) -> Iterator[tuple[str, str]]:
    for call in calls:
        if call.name in VERBS:
            yield f"driver {names[call.target]}", call.name
        elif call.pid not in names:
            yield "arena", call.name
        elif call.thread == LIBRARY:
            yield names[call.pid], call.name


def _ways(who: str, call: str) -> Iterator[str]:
    yield UNKNOWN
    if call in GREEDY:
        yield OUT_OF_MEMORY
    yield "hang" if who != who[:1] else "hold"  # what hangs in a program itself, hangs forever
    if call in VERBS[2:]:
        yield "hang-after"
    yield "crash"
    yield "kill"


def chosen(every: Iterable[Fault], most: int, seed: int) -> list[Fault]:
    """Return so many faults: one of each kind, and one of each operation's callers, then others, by chance."""
    left = list(every)
    random.Random(seed).shuffle(left)
    first: dict[object, Fault] = {fault.kind: fault for fault in left}
    seen = {(fault.operation, fault.who) for fault in first.values()}
    first |= {place: fault for fault in left if (place := (fault.operation, fault.who)) not in seen}
    others = [fault for fault in left if fault not in first.values()]
    return [*first.values(), *others][: max(most, len(first))]
