"""`kybernate store simulate`: what the policy of the tiers would do on a trace of uses, compared with LRU and LFU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from kybernate.agent.settings import Settings
from kybernate.agent.tier_rules import rules_of
from kybernate.cli.formats import Format, Output, Table
from kybernate.cli.output import seconds, size
from kybernate.node.failure import Failure
from kybernate.store.policy.model import TierState
from kybernate.store.simulation.simulate import REPLACEMENTS, Replayed, Setup, replay
from kybernate.store.simulation.synthetic import MAKERS, synthetic
from kybernate.store.simulation.traces import Access, read_traces
from kybernate_shim.config.forms import BYTES

SYNTHETIC = "synthetic:"
HEADER = ("POLICY", "HITS", "HIT BYTES", "MOVED", "WAITED", "PREFETCHED", "IN VAIN", "USES")
NARROW = 5


TRACE_UNREADABLE_ADVICE: Final = "docs/tiers.md describes the formats"


class Slower(StrEnum):
    """The tier of images that are not in memory."""

    DISK = "disk"
    OBJECT = "object"


def simulate(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...",
            help=f"Files, or one of {', '.join(SYNTHETIC + name for name in MAKERS)}.",
            show_default=False,
        ),
    ],
    capacity: Annotated[str, typer.Option(metavar="BYTES", help="Memory for images.")] = "64GiB",
    slower: Annotated[
        Slower, typer.Option("--from", metavar="TIER", help="Tier that holds all images: disk or object.")
    ] = Slower.OBJECT,
    image_size: Annotated[
        str, typer.Option("--size", metavar="BYTES", help="Size of each image where the trace has none.")
    ] = "8GiB",
    idle: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a workload stays running after a use.")
    ] = 0,
    output: Output = Format.TABLE,
) -> None:
    """Replay a trace of uses against LRU, LFU and the node's policy.

    Speeds and rules are those of `tiers` in agent.toml. MOVED was read from the slower tier, WAITED is the sum over all
    restores.
    """
    wanted = Settings.load().tiers
    source = wanted.disk if slower == Slower.DISK else wanted.object
    setup = Setup(
        _bytes("--capacity", capacity),
        TierState(read_bytes_per_second=wanted.ram.read_bytes_per_second),
        TierState(read_bytes_per_second=source.read_bytes_per_second),
        rules_of(wanted),
    )
    if not wanted.policy.prefetch:
        setup = replace(setup, prefetch=False)
    trace = _read(traces, setup, _bytes("--size", image_size), idle)
    outcomes = [replay(trace, name, setup) for name in REPLACEMENTS]
    Table(HEADER, _row, _document, NARROW, lambda one: one.policy).show(output, outcomes)


def _read(traces: list[str], setup: Setup, image_size: int, idle: float) -> list[Access]:
    first = traces[0]
    if first.startswith(SYNTHETIC):
        try:
            return synthetic(first.removeprefix(SYNTHETIC), setup.rules.zone)
        except KeyError:
            raise Failure(f"there is no trace {first}", advice=f"there are {', '.join(MAKERS)}") from None
    try:
        found = read_traces(map(_lines, traces), size=image_size, idle=idle)
    except (OSError, ValueError) as error:
        raise Failure(f"the trace cannot be read: {error}", advice=TRACE_UNREADABLE_ADVICE) from error
    if not found:
        raise Failure("the trace has no uses", advice=TRACE_UNREADABLE_ADVICE)
    return found


def _lines(name: str) -> Iterator[str]:
    with Path(name).open(encoding="utf-8") as file:
        yield from file


def _bytes(option: str, text: str) -> int:
    try:
        return int(BYTES.parse(text))
    except ValueError:
        raise typer.BadParameter(f"must be {BYTES.words}", param_hint=option) from None


def _row(one: Replayed) -> tuple[object, ...]:
    return (
        one.policy,
        f"{one.hit_ratio:.1%}",
        f"{one.hit_bytes / one.used_bytes if one.used_bytes else 0:.1%}",
        size(one.moved_bytes),
        seconds(one.waited_seconds) if one.waited_seconds < 7200 else f"{one.waited_seconds / 3600:.1f} h",
        one.prefetched,
        one.prefetched_in_vain,
        one.uses,
    )


def _document(one: Replayed) -> dict[str, object]:
    return {**asdict(one), "hit_ratio": one.hit_ratio}
