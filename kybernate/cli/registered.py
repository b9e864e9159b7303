"""The registry's images, as its agent lists them: labels, pins, workloads, tiers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from fnmatch import fnmatchcase

import typer

from kybernate.cli.formats import NONE, Format, Table, document_of, moment
from kybernate.cli.output import age, size
from kybernate.client import Agent
from kybernate.messages import agent_pb2 as wire

HEADER = (
    *("NAME", "NAMESPACE", "SOURCE", "SIZE", "AGE", "TIERS", "STATE"),
    *("WORKLOAD", "GENERATION", "PINNED", "LABELS", "USED", "RESTORE", "ID"),  # of the wide table
)
NARROW = 7


def registered(
    agent: Agent,
    names: list[str],
    namespace: str,
    labels: Iterable[str],
    workload: str,
    *,
    pinned: bool,
    format: Format,
    quiet: bool,
) -> None:
    """Print the images that match: names and patterns, and what the registry filters by."""
    wanted = dict(_label(text) for text in labels)
    found = agent.images(namespace=namespace, labels=wanted, workload=workload, pinned=pinned)
    shown = [one for one in found if not names or any(is_named(one, name) for name in names)]
    if quiet:
        for one in shown:
            typer.echo("\n".join(replica.place for replica in one.replicas))
    else:
        TABLE.show(format, shown)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--label")
    return key, value


def is_named(one: wire.Image, name: str) -> bool:
    """Return whether a name or a pattern fits any copy of an image."""
    own = {word.rpartition("/")[2] for word in _names(one)}  # an image below a trusted root has its path for a name
    known = {one.id, *_names(one), *own, *(f"{one.source.namespace}/{word}" for word in (*_names(one), *own))}
    return any(fnmatchcase(word, name) for word in (*known, *(replica.place for replica in one.replicas)))


def _names(one: wire.Image) -> tuple[str, ...]:
    """Return what copies of an image are called, each name once."""
    return tuple(dict.fromkeys((one.name, *(replica.name for replica in one.replicas if replica.name))))


def _row(one: wire.Image) -> tuple[object, ...]:
    source = f"{one.source.pod}/{one.source.container}" if one.source.pod else one.source.container
    labels = ",".join(f"{key}={value}" for key, value in sorted(one.labels.items()))
    used = moment(one.last_used)
    return (
        ", ".join(_names(one)),
        one.source.namespace or NONE,
        source or NONE,
        size(one.bytes),
        age(time.time() - moment(one.created)),
        ",".join(sorted({replica.tier for replica in one.replicas})) or NONE,
        ", ".join(one.states) or "usable",
        one.source.workload or NONE,
        one.generation,
        "yes" if one.pinned else "no",
        labels or NONE,
        age(time.time() - used) if used else NONE,
        f"{one.last_restore_seconds:.1f}s" if one.last_restore_seconds else NONE,
        one.id,
    )


TABLE = Table(HEADER, _row, document_of, NARROW)
