"""Every annotation that pods and containers may carry for Kybernate, with the values that it takes.

An unknown key, or a value without meaning, has no effect, as everywhere in Kubernetes: the node's agent adds a warning
to the pod. One kind is refused instead when the container is created: what looks like a request for a restore. Without
it the program would start from the beginning, and often write over what the restore was to bring back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kybernate_shim.errors import Refused

PREFIX: Final = "kybernate"  # begins all of them, and keys that are meant to be one
DOMAIN: Final = "kybernate.io/"
RESTORE_FROM: Final = "kybernate.io/restore-from"
CHECKPOINT: Final = "kybernate.io/checkpoint"
VRAM: Final = "kybernate.io/vram"
WAKE_ON_USE: Final = "kybernate.io/wake-on-use"
SEAT: Final = "kybernate.io/seat"
PRIORITY: Final = "kybernate.io/priority"  # also a label of containers of `kybernate up`
KUBELETS_SEAT: Final = "kyb.ai/seat"  # by the device plugin: no author of a pod can set it
CLOSE: Final = 0.75  # of 1: how similar a key is to the one that was meant
MOST_SHOWN: Final = 100  # characters of what a tenant has written


@dataclass(frozen=True)
class Annotation:
    """What an annotation takes. `per_container`: its key may end with `.CONTAINER`."""

    values: str
    accepts: Callable[[str], bool]
    per_container: bool = False


def _among(*words: str) -> Annotation:
    return Annotation(" or ".join(f'"{word}"' for word in words), lambda value: value in words)


def _matching(words: str, pattern: str, *, per_container: bool = False) -> Annotation:
    return Annotation(words, lambda value: re.fullmatch(pattern, value, re.ASCII) is not None, per_container)


def _is_map(value: str) -> bool:
    return all(re.fullmatch(r"GPU-[^=]+=GPU-[^=]+", entry) for entry in re.split(r"[,\s]+", value) if entry)


def bytes_of(value: str) -> int:
    """Parse a quantity of bytes as Kubernetes writes it, such as "24Gi" or "500M"; 0 is none, or anything else."""
    found = re.fullmatch(r"(\d{1,15})([KMGT]i|[kMGT]?)", value, re.ASCII)
    if found is None:
        return 0
    unit = found[2]
    step = 1024 if unit.endswith("i") else 1000
    power = "KMGT".index(unit[0].upper()) + 1 if unit else 0
    return int(found[1]) * int(step**power)


_ANY: Final = Annotation("a text", lambda value: True)
_SWITCH: Final = _among("true", "false")
KNOWN: Final[Mapping[str, Annotation]] = {
    RESTORE_FROM: Annotation("the name of an image", lambda value: True, per_container=True),  # "" is none
    CHECKPOINT: _matching('a name: letters, digits, ".", "_" and "-"', r"[A-Za-z0-9][\w.-]{0,254}", per_container=True),
    "kybernate.io/on-restart": _among("latest", "same", "fresh"),
    "kybernate.io/max-freeze": _matching(
        'a time above 0 such as "2s" or "500ms", or "none"', r"none|(?=[0 .]*[1-9])\d{1,9}(\.\d{1,9})? ?(ms|s|m|)"
    ),
    "kybernate.io/tcp": _among("close", "established"),
    "kybernate.io/volumes": _ANY,  # its own errors name what is wrong, before a dump
    "kybernate.io/force": _SWITCH,
    "kybernate.io/arena": _SWITCH,
    "kybernate.io/nccl-safe": _SWITCH,
    VRAM: Annotation('bytes on each GPU, such as "24Gi"', lambda value: bytes_of(value) > 0),
    WAKE_ON_USE: _SWITCH,
    "kybernate.io/pause": _among("suspend"),
    "kybernate.io/gpu-map": Annotation("GPU-…=GPU-…, with commas between them", _is_map),
    "kybernate.io/operation": _ANY,
    "kybernate.io/criu-config": _ANY,
    "kybernate.io/workload": _ANY,
    SEAT: _matching("the name of a profile of seats", r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?"),
    PRIORITY: _matching("a whole number", r"-?\d{1,9}"),
    "kybernate.io/kind": _matching("a word that windows prefer", r"[A-Za-z0-9][\w.-]{0,62}"),
    "kybernate.io/stands-by-for": _ANY,
    "kybernate.io/wake": _ANY,
}


@dataclass(frozen=True)
class Mistake:
    """An annotation that lacks the effect that it seems intended for. `meant` is the nearest existing key, or empty."""

    key: str
    fault: str
    meant: str = ""

    @property
    def loses_state(self) -> bool:
        """Return whether a restore seems to be intended."""
        return self.meant.startswith(RESTORE_FROM)

    def __str__(self) -> str:
        advice = f"; did you mean {self.meant}?" if self.meant and self.meant != self.key else ""
        return f"annotation {shown(self.key)}: {self.fault}{advice}"


def mistake(key: str, value: str, containers: Iterable[str] = ()) -> Mistake | None:
    """Return what is wrong with an annotation, None where nothing is, or where it is not one of ours.

    `containers` are the names of the pod's containers, as far as they are known; without any, a name is not examined.
    """
    if PREFIX not in key:
        return None
    base, container = split(key)
    kind = KNOWN.get(base)
    if kind is None or (container and not kind.per_container):
        return Mistake(key, "no annotation of Kybernate has this key", nearest(key))
    names = list(containers)
    if container and names and container not in names:
        import difflib

        near = difflib.get_close_matches(container, names, 1, 0.0)
        return Mistake(key, f"the pod has no container {shown(container)}", f"{base}.{near[0]}" if near else "")
    if not kind.accepts(value):
        return Mistake(key, f"{shown(value)} is not {kind.values}", base)
    return None


def has_seat(annotations: Mapping[str, str]) -> bool:
    """Return whether a container has a seat: one from the kubelet, or one of a profile that it names."""
    return bool(annotations.get(KUBELETS_SEAT) or annotations.get(SEAT))


def split(key: str) -> tuple[str, str]:
    """Return the annotation's own key, and the container that follows it, "" where none does."""
    if key in KNOWN or not key.startswith(DOMAIN):
        return key, ""
    name, _, container = key[len(DOMAIN) :].partition(".")
    return DOMAIN + name, container


def nearest(key: str) -> str:
    """Return the key that was probably meant, with the same container, "" where none is similar."""
    import difflib  # loaded for a mistake, and not with each daemon

    base, dot, container = key.rpartition("/")[2].partition(".")
    names = {one[len(DOMAIN) :]: one for one in KNOWN}
    word = base.lower().replace("_", "-")
    found = difflib.get_close_matches(word, names, 1, CLOSE)
    if not found and "restore" in word:
        found = [RESTORE_FROM[len(DOMAIN) :]]
    if not found:
        return ""
    kept = dot + container if KNOWN[names[found[0]]].per_container else ""
    return names[found[0]] + kept


def require_unmistaken(annotations: Mapping[str, str]) -> None:
    """Refuse annotations that look like a request for a restore, and are not valid. Raises Refused."""
    for key, value in sorted(annotations.items()):
        found = mistake(key, value)
        if found is not None and found.loses_state:
            raise Refused(
                f"{found}. The container was not started, since its program would begin from the start;"
                " correct the annotation, or remove it"
            )


def shown(text: str) -> str:
    """Return a tenant's text in a form for messages: of bounded length, and on one line."""
    return ascii(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…")
