"""What containers say of their seats in their specs, and which seat one without Kubernetes gets. Pure.

A pod's seat is kubelet's choice: the device plugin notes it in an annotation that no author of a pod can set. A
container without Kubernetes names a profile, and the arbiter's choice is kept as a label in containerd's record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kybernate.node.specs import VISIBLE_DEVICES, Spec
from kybernate.seats.groups import Place
from kybernate_shim.oci.annotations import KUBELETS_SEAT, PRIORITY, SEAT, VRAM, WAKE_ON_USE, bytes_of

ALL: Final = frozenset({"", "all", "void", "none"})  # of NVIDIA_VISIBLE_DEVICES, where it says nothing of a seat
Key = tuple[str, str]  # namespace and id of a container
MOST_PRIORITY: Final = 2_000_000_000


@dataclass(frozen=True)
class Claim:
    """A container's seat by name, or the profile that it wants one of; and what it says of its needs.

    `vram` is bytes on each GPU, `visible` the GPUs that its environment names. `stands_by_for` names another
    container, or its seat.
    """

    seat: str = ""
    profile: str = ""
    vram: int = 0
    priority: int = 0
    kind: str = ""
    stands_by_for: str = ""
    wake_on_use: bool = True
    visible: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.seat or self.profile)


def claim_of(spec: Spec, labels: Mapping[str, str], *, in_pod: bool, of_up: bool = False) -> Claim:
    """Return what a container claims, nothing where it has no seat. A value that means nothing counts as absent.

    `kybernate up` changes the priority of a container `of_up` by a label; those of others may be their images'.
    """
    found = spec.get("annotations")
    notes = {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}
    seat = notes.get(KUBELETS_SEAT, "") if in_pod else labels.get(SEAT, "")
    profile = "" if in_pod else notes.get(SEAT, "")
    if not seat and not profile:
        return Claim()
    return Claim(
        seat,
        profile,
        bytes_of(notes.get(VRAM, "")),
        _number((labels.get(PRIORITY) if of_up else "") or notes.get(PRIORITY, "")) if not in_pod else 0,
        notes.get("kybernate.io/kind", ""),
        notes.get("kybernate.io/stands-by-for", ""),
        notes.get(WAKE_ON_USE, "true") != "false",
        _visible(spec),
    )


@dataclass(frozen=True)
class Given:
    """The container of each seat that has one, and those for which no seat of their profile is left."""

    keys: dict[str, Key]
    lacking: frozenset[Key]


def assigned(
    claims: Mapping[Key, Claim],
    before: Mapping[str, Key],
    places: Mapping[str, Place],
    kubelets: Iterable[str],
    uuids: Mapping[int, str],
) -> Given:
    """Return the container of each seat. Those that have one keep it; of two that name one, the first known.

    `claims` are those of live containers, `before` the seats' containers until now, `kubelets` the seats that kubelet
    has given out, and `uuids` those of the GPUs.
    """
    had = {key: name for name, key in before.items()}
    order = sorted(claims, key=lambda key: (bool(claims[key].profile), key not in had, key))
    keys: dict[str, Key] = {}
    given, lacking = set(kubelets), set()
    for key in order:
        claim = claims[key]
        if not claim.profile:
            if claim.seat in places:
                keys.setdefault(claim.seat, key)
            continue
        wanted = replace(claim, seat=claim.seat or had.get(key, ""))
        taken = {*keys, *given} & places.keys()
        loads = Counter(gpu for name in taken for gpu in places[name].group.gpus)
        place = choose(wanted, places.values(), taken, loads, uuids)
        if place is None:
            lacking.add(key)
        else:
            keys[place.name] = key
    return Given(keys, frozenset(lacking))


def choose(
    claim: Claim, places: Iterable[Place], taken: Collection[str], loads: Mapping[int, int], uuids: Mapping[int, str]
) -> Place | None:
    """Return the seat for a container: the one that it has had, else one of the least loaded GPUs that it sees.

    `taken` are seats that others have, `loads` how many seats of each GPU are taken.
    """
    free = [one for one in places if one.profile.name == claim.profile and one.name not in taken]
    for one in free:
        if one.name == claim.seat:
            return one
    wanted = {index for index, uuid in uuids.items() if {uuid, str(index)} & set(claim.visible)}
    seen = [one for one in free if wanted <= set(one.group.gpus)]
    return min(seen, key=lambda one: _rank(one, loads), default=None)


def _rank(place: Place, loads: Mapping[int, int]) -> tuple[int, tuple[int, ...], int, str]:
    return sum(loads.get(gpu, 0) for gpu in place.group.gpus), place.group.gpus, len(place.name), place.name


def _number(text: str) -> int:
    try:
        return max(-MOST_PRIORITY, min(MOST_PRIORITY, int(text)))
    except ValueError:
        return 0


def _visible(spec: Spec) -> tuple[str, ...]:
    process = spec.get("process")
    found: Sequence[object] = (process.get("env") or ()) if isinstance(process, dict) else ()
    named = [one[len(VISIBLE_DEVICES) :] for one in found if isinstance(one, str) and one.startswith(VISIBLE_DEVICES)]
    return tuple(named[-1].split(",")) if named and named[-1] not in ALL else ()
