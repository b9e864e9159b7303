"""Which image a pod's container starts from, at its first start and when it starts again; decisions without I/O.

`kybernate.io/restore-from` says what the first start is from:

| value | the image |
|---|---|
| NAME | that one |
| NAME@latest | the newest that descends from it, over restores |
| latest | the newest of the container of this name in a pod of this name; without one, the container starts fresh |

A container starts again when its program has ended, or was ended with an image. `kybernate.io/on-restart` chooses then:
`latest`, the default, is the newest image that this container of this pod has written, else what the first start was
from, else a fresh start; `same` is what the first start was from; `fresh` is none. An image from which the program has
ended soon three times holds its end, and is left aside by `latest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Literal

from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.image.requested import Wanted
from kybernate_shim.errors import Refused
from kybernate_shim.trust.requester import Requester

LATEST: Final = "latest"
ON_RESTART: Final = "kybernate.io/on-restart"
SOON: Final = 600.0  # seconds; the kubelet forgets a container's crashes after as many
MOST_SHORT_RUNS: Final = 3
SHOWN: Final = 5

OnRestart = Literal["fresh", "same", "latest"]


@dataclass(frozen=True)
class KnownImage:
    """An image of a namespace: its name there, and what its manifest says of where it comes from."""

    name: str
    id: str
    time: datetime
    container: str  # its id
    container_name: str
    pod: str
    pod_uid: str
    origin: str
    parent: str

    @classmethod
    def of(cls, name: str, manifest: Manifest) -> KnownImage:
        source, lineage = manifest.source, manifest.lineage
        return cls(
            name,
            manifest.id,
            datetime.fromisoformat(manifest.time),
            source.container,
            source.name,
            source.pod,
            lineage.pod_uid,
            manifest.origin,
            lineage.parent,
        )


@dataclass(frozen=True)
class Run:
    """One run of a container of a pod that has ended: from the image of that id, "" for none, and for how long."""

    image: str
    seconds: float


@dataclass(frozen=True)
class Start:
    """What a container starts from: the image of that name, "" for none, and why.

    `optional`: where there is no such image any more, it starts fresh. `again`: it has run in its pod before, and
    nothing asks for this very image.
    """

    name: str
    why: str
    optional: bool = False
    again: bool = False


def on_restart(text: str) -> OnRestart:
    """Return what the annotation says. Raises Refused."""
    match text:
        case "" | "latest":
            return "latest"
        case "same" | "fresh":
            return text
    raise Refused(f"annotation {ON_RESTART}: expected fresh, same or latest, found {text[:60]!a}. Nothing was started")


def start_of(
    wanted: Wanted, restart: OnRestart, who: Requester, images: Sequence[KnownImage], runs: Sequence[Run]
) -> Start:
    """Return what a container of a pod starts from. `runs` are its earlier ones in this pod, the oldest first.

    `images` are those of the pod's namespace that are known on this node. Raises Refused.
    """
    own = [image for image in images if who.uid and (image.pod_uid, image.container_name) == (who.uid, who.container)]
    if not own and not runs:
        return _first(wanted, who, images)
    if restart == "fresh":
        return Start("", f"it starts again, and annotation {ON_RESTART} is fresh")
    if restart == "same":
        return _first(wanted, who, images)
    if own:
        return Start(_newest(own).name, "it starts again, from the newest image that it has written", True, True)
    return replace(_first(wanted, who, images), optional=True, again=True)


def is_given_up(image: str, start: Start, runs: Sequence[Run]) -> bool:
    """Return whether the image of that id is left aside, because the program has ended soon after it each time."""
    short = sum(run.image == image and run.seconds < SOON for run in runs)
    return start.again and short >= MOST_SHORT_RUNS


def asked(name: str) -> tuple[str, bool, str]:
    """Return the name in what an annotation asks for, whether a word follows it after `@`, and that word.

    A path, as below a trusted root, is a name as it is.
    """
    base, at, which = name.partition("@")
    return (name, False, "") if name.startswith("/") else (base, bool(at), which)


def _first(wanted: Wanted, who: Requester, images: Sequence[KnownImage]) -> Start:
    name, at, which = asked(wanted.name)
    if at:
        if which != LATEST or not name:
            raise Refused(
                f"{wanted.by}: {wanted.name[:200]!a}: expected NAME, NAME@{LATEST} or {LATEST}. Nothing was restored"
            )
        return _latest_of(name, wanted, images)
    if name != LATEST:
        return Start(name, f"{wanted.by} names it")
    if any(image.name == LATEST for image in images):
        raise Refused(
            f"{wanted.by}: {LATEST} is also the name of an image of the namespace {who.namespace}. Nothing was"
            f" restored; give that image another name: `kybernate import {who.namespace}/{LATEST} NAME"
            f" --namespace {who.namespace}`"
        )
    there = [image for image in images if (image.pod, image.container_name) == (who.pod, who.container)]
    if not there:
        return Start("", f"there is no image of container {who.container} of a pod {who.pod}")
    return Start(_newest(there).name, f"the newest image of container {who.container} of a pod {who.pod}")


def _latest_of(name: str, wanted: Wanted, images: Sequence[KnownImage]) -> Start:
    anchor = next((image for image in images if image.name == name), None)
    if anchor is None:
        return Start(name, f"{wanted.by} names it, and no image that is known here descends from it")
    family = _descendants(anchor, images)
    heads = [one for one in family if not any(_follows(later, one, images) for later in family)]
    if len(heads) > 1:
        names = ", ".join(sorted(image.name for image in heads)[:SHOWN])
        raise Refused(
            f"{wanted.by}: {len(heads)} containers descend from {name}, and each has a newest image: {names}. Nothing"
            " was restored; name the one that is meant"
        )
    return Start(heads[0].name, f"the newest image that descends from {name}")


def _descendants(anchor: KnownImage, images: Sequence[KnownImage]) -> list[KnownImage]:
    """Return the image `anchor` and all that came after it, in its container and in what was restored from those."""
    family = [anchor]
    rest = [image for image in images if image.origin == anchor.origin and image.id != anchor.id]
    while found := [image for image in rest if any(_follows(image, one, images) for one in family)]:
        family += found
        rest = [image for image in rest if image not in found]
    return family


def _follows(later: KnownImage, earlier: KnownImage, images: Sequence[KnownImage]) -> bool:
    """Return whether one image has what the other one has, and more.

    Where the image between them was removed, the one that was made later counts as the other's.
    """
    if later.container == earlier.container:
        return later.time > earlier.time
    if later.parent == earlier.id:
        return True
    lost = bool(later.parent) and all(image.id != later.parent for image in images)
    return lost and later.time > earlier.time


def _newest(images: Sequence[KnownImage]) -> KnownImage:
    return max(images, key=lambda image: (image.time, image.name))
