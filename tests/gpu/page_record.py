"""What a node's page is told, recorded where there is no browser: one line of JSON for each change of its source.

    python -m tests.gpu.page_record record ADDRESS RECORD
    python -m tests.gpu.page_record cut RECORD STATE [--at SECONDS]

`record` follows an agent until SIGTERM, as `tests/gpu/serve` has it do. `cut` writes the changes that bring a page to
what it showed at one moment, by default the last at which a model was on its way to the GPU; tests/browser makes a
screenshot of that file.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from kybernate.page import view
from kybernate.page.known import WAKES, WAKING, Known
from kybernate.page.view import Begin, Change, End, Found, Gone, Lost, Object, Operation, Put

KINDS: Final[dict[str, type[Any]]] = {one.__name__: one for one in (*view.SECTIONS, Put, Gone, Begin, End, Lost, Found)}
NODE: Final = "gpu-node"  # instead of the machine's own name
LEVEL: Final = 6
SHOWN_OPERATIONS: Final = 20


@dataclass(frozen=True)
class Moment:
    """A change, and when it was told: seconds since the recording began."""

    at: float
    change: Change


def encoded(moment: Moment) -> bytes:
    """Return a moment as a line: {"at": …, "is": "Put", "of": "Gpu", "value": {…}}."""
    change = moment.change
    line: dict[str, object] = {"at": round(moment.at, 3), "is": type(change).__name__}
    if isinstance(change, Put | Gone):
        line |= {"of": type(change.object).__name__, "value": _fields(change.object)}
    else:
        line["value"] = _fields(change)
    return msgspec.json.encode(line) + b"\n"


def _fields(value: object) -> dict[str, object]:
    """Return the fields of a dataclass that are not as the class has them by default."""
    kept: dict[str, object] = {
        name: one for name, one in msgspec.to_builtins(value).items() if one or not hasattr(type(value), name)
    }
    return kept


def decoded(line: bytes) -> Moment:
    """Return the moment of a line. Raises msgspec.ValidationError and KeyError."""
    found = msgspec.json.decode(line)
    kind = KINDS[found["is"]]
    if kind in (Put, Gone):
        return Moment(found["at"], kind(msgspec.convert(found["value"], KINDS[found["of"]])))
    return Moment(found["at"], msgspec.convert(found["value"], kind))


def read(path: Path) -> list[Moment]:
    """Return the moments of a file, compressed or not; a recording that was killed has those until then."""
    moments: list[Moment] = []
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as lines, suppress(EOFError):
        moments.extend(decoded(line) for line in lines if line.endswith(b"\n"))
    return moments


# -- recording


@contextmanager
def recording(address: str, path: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Record what a page of the agent at an address is told while the block runs, by another process."""
    argv = [sys.executable, "-m", "tests.gpu.page_record", "record", address, str(path)]
    with subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


async def _record(address: str, path: Path) -> None:
    """Write all changes to a compressed file until SIGTERM."""
    from kybernate.page.node import NodeSource  # needs grpc; a moment is cut out without

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began, former = time.monotonic(), None
    with gzip.open(path, "wb", LEVEL) as file, suppress(asyncio.CancelledError):
        async for change in NodeSource(address).changes():
            if change != former:  # an agent that stays away is away once
                file.write(encoded(Moment(time.monotonic() - began, change)))
            former = change


# -- one moment of it


def telling_moment(moments: Sequence[Moment]) -> float:
    """Return when a page had most to show: the last time that a model's memory was on its way to the GPU."""

    def last(condition: Any) -> float | None:
        times = (
            one.at
            for one in reversed(moments)
            if isinstance(one.change, Put) and isinstance(one.change.object, Operation) and condition(one.change.object)
        )
        return next(times, None)

    moving = last(lambda one: one.live and one.verb in WAKING and 0 < one.done < one.total)
    live = last(lambda one: one.live and one.verb in WAKING) if moving is None else moving
    return live if live is not None else moments[-1].at if moments else 0.0


def state_at(moments: Iterable[Moment], at: float) -> list[Change]:
    """Return the changes by which an empty page shows what one showed at a moment, but for its events."""
    known = Known()
    for one in moments:
        if one.at <= at:
            known.apply(one.change)
    operations = known.operations()
    wakes = (one for container in known.containers() for one in _wakes(operations, container.key))
    kept = {one.key: one for one in (*wakes, *operations[:SHOWN_OPERATIONS])}
    operations = sorted(kept.values(), key=lambda one: one.created)
    shown: list[Sequence[Object]] = [
        known.gpus(),
        [one for one in known.seats() if one.container],  # those that are free say nothing
        known.containers(),
        operations,
        known.tiers(),
        known.images(),
    ]
    return [Found(NODE, known.versions), Begin(), *(Put(one) for objects in shown for one in objects), End()]


def _wakes(operations: Sequence[Operation], container: str) -> Iterator[Operation]:
    """Yield the operations of a container's chart, without their steps."""
    found = (one for one in operations if one.container == container and one.verb in WAKING and not one.live)
    return (replace(one, steps=one.steps[:1]) for one in islice(found, WAKES))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.page_record", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, first, second in (("record", "address", "record"), ("cut", "record", "state")):
        command = commands.add_parser(name)
        command.add_argument(first, type=str if first == "address" else Path)
        command.add_argument(second, type=Path)
    command.add_argument("--at", type=float, metavar="SECONDS", help="since the recording began")
    arguments = parser.parse_args()
    if arguments.command == "record":
        asyncio.run(_record(arguments.address, arguments.record))
        return
    moments = read(arguments.record)
    at = telling_moment(moments) if arguments.at is None else arguments.at
    arguments.state.write_bytes(b"".join(encoded(Moment(0.0, change)) for change in state_at(moments, at)))
    print(f"{arguments.state}: the page {at:.1f} s after the recording began, which ended at {moments[-1].at:.1f} s")


if __name__ == "__main__":
    main()
