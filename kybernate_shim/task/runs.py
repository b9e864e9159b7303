"""How often a container of a pod has run, and from which images: this decides what a new one of its name starts from.

The kubelet makes a new container for each start, the shim's daemon lives no longer than the pod's sandbox, and a node
may reboot: so a file for each pod records it, as long as the directory exists that the kubelet, or containerd, has made
for the pod. It lists only containers that request an image.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kybernate_shim import bounded_json
from kybernate_shim.checkpoint.image.starts import Run
from kybernate_shim.linux.atomic_write import replace_file
from kybernate_shim.linux.plain_files import read_plain
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.places import make_private
from kybernate_shim.trust.requester import requester_of

DIRECTORY: Final = "pods"  # in the work root
MOST_RUNS: Final = 16  # of a container that are kept
MOST_CONTAINERS: Final = 64  # of a pod
MOST_BYTES: Final = 1 << 20
UID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")


@dataclass(frozen=True)
class PodRuns:
    """The runs of one container of a pod, in a file of the pod. `lives_with` is a directory that ends with the pod."""

    file: Path
    container: str
    lives_with: str

    @classmethod
    def of(cls, spec: Spec, work_root: Path) -> PodRuns | None:
        """Return the runs of the container with this config.json; None where its pod is not found."""
        who = requester_of(spec)
        if not who.sandbox or not UID.fullmatch(who.uid) or not (lives_with := _directory_of_pod(spec)):
            return None
        return cls(work_root / DIRECTORY / f"{who.uid}.json", who.container, lives_with)

    def read(self) -> tuple[Run, ...]:
        """Return the runs that have ended, the oldest first; blocks."""
        return tuple(_runs(_document(self.file), self.container))

    def add(self, run: Run) -> None:
        """Add a run that has ended, and forget pods that are gone; blocks. Raises OSError and Refused."""
        make_private(self.file.parent)
        document = _document(self.file)
        runs = [*_runs(document, self.container), run][-MOST_RUNS:]
        containers = document.get("containers")
        others = containers if isinstance(containers, dict) else {}
        kept = {name: others[name] for name in list(others)[-MOST_CONTAINERS:]}
        kept[self.container] = [[one.image, round(one.seconds, 3)] for one in runs]
        replace_file(self.file, json.dumps({"lives_with": self.lives_with, "containers": kept}))
        _forget_gone(self.file.parent)


def _directory_of_pod(spec: Spec) -> str:
    """Return the kubelet's directory of the pod, else containerd's of its sandbox, as the mounts name it; may be ""."""
    who = requester_of(spec)
    sources = [os.path.normpath(str(mount.get("source") or "/")) for mount in spec.mounts]
    for above, id in (("pods", who.uid), ("sandboxes", who.sandbox)):
        for source in sources:
            before, found, _ = source.partition(f"/{above}/{id}/")
            if found:
                return f"{before}/{above}/{id}"
    return ""


def _forget_gone(directory: Path) -> None:
    for path in directory.glob("*.json"):
        lives_with = _document(path).get("lives_with")
        if isinstance(lives_with, str) and not os.path.lexists(lives_with):
            path.unlink(missing_ok=True)


def _document(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        document = bounded_json.parse(read_plain(path, most=MOST_BYTES))
        if isinstance(document, dict):
            return document
    return {}


def _runs(document: dict[str, Any], container: str) -> Iterator[Run]:
    containers = document.get("containers")
    for one in (containers.get(container) or ()) if isinstance(containers, dict) else ():
        match one:
            case [str(image), float() | int() as seconds]:
                yield Run(image, float(seconds))
