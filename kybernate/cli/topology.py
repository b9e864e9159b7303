"""`kybernate topology`: the GPUs of this node, how they are connected, and the groups that seats have there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from kybernate.agent.parts.seats import gpus_of, topology_of
from kybernate.agent.seat_settings import configuration_of, read_file
from kybernate.agent.settings import Settings
from kybernate.agent.tier_rules import zone_of
from kybernate.cli.formats import NONE, Format, Output, Table
from kybernate.cli.output import echo
from kybernate.cli.schedule import FORMAT, File
from kybernate.node import cuda
from kybernate.node.failure import Invalid, Unavailable
from kybernate.seats.configuration import SeatsInvalid
from kybernate.seats.groups import WORDS, Group, Topology, groups_of

SIZES: Final = (1, 2, 4, 8)  # of groups, where no seats are configured


@dataclass(frozen=True)
class _Gpu:
    """A GPU of the matrix. `links` are its paths to all GPUs in order, X to itself."""

    index: int
    uuid: str
    name: str
    numa: int
    links: Sequence[str]
    groups: Sequence[str]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(topology)


def topology(file: File = None, output: Output = Format.TABLE) -> None:
    """Show the GPUs of this node, how each pair is connected, and the groups that are made of them."""
    info = cuda.info()
    if not info.gpus:
        raise Unavailable("the driver reports no GPU", advice="`kybernate doctor` shows what it answers")
    found = topology_of(info)
    groups = _groups(found, file)
    names = {gpu.uuid: gpu.name for gpu in info.gpus}
    gpus = [_gpu(index, uuid, names[uuid], found, groups) for index, uuid in sorted(gpus_of(info).uuids.items())]
    header = ("GPU", *(f"GPU{gpu.index}" for gpu in gpus), "NUMA", "GROUPS", "MODEL", "UUID")

    def row(gpu: _Gpu) -> tuple[object, ...]:
        links = [gpu.links[other.index] for other in gpus]
        numa = NONE if gpu.numa < 0 else gpu.numa
        return (f"GPU{gpu.index}", *links, numa, " ".join(gpu.groups) or NONE, gpu.name, gpu.uuid)

    Table(header, row, _document, len(gpus) + 3, lambda gpu: gpu.uuid).show(output, gpus)
    if output in (Format.TABLE, Format.WIDE):
        used = {link.rstrip("0123456789") for gpu in gpus for link in gpu.links}
        echo("")
        for word, meaning in WORDS.items():
            if word in used:
                echo(f"{word}{'#' if word == 'NV' else ''} = {meaning}")


def _groups(found: Topology, file: Path | None) -> list[Group]:
    """Return the groups of the configuration, else those of all usual sizes. Raises Invalid."""
    try:
        configuration = read_file(file, zone_of("")) if file else configuration_of(Settings.load().seats)
        if configuration is not None and (configuration.profiles or configuration.groups):
            return list(configuration.groups_for(found))
    except SeatsInvalid as error:
        raise Invalid(str(error), advice=FORMAT) from error
    return list(groups_of(found, [size for size in SIZES if size <= found.count]))


def _gpu(index: int, uuid: str, name: str, found: Topology, groups: Sequence[Group]) -> _Gpu:
    of = [group.name for group in groups if index in group.gpus]
    return _Gpu(index, uuid, name, found.numa[index], found.links[index], of)


def _document(gpu: _Gpu) -> Mapping[str, object]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "model": gpu.name,
        "numa_node": gpu.numa,
        "links": [{"gpu": other, "path": path} for other, path in enumerate(gpu.links) if path != "X"],
        "groups": list(gpu.groups),
    }
