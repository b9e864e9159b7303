"""Which image a container asks to be restored from, by itself; whether it may is said in locate.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kybernate_shim.config import Config
from kybernate_shim.oci.annotations import RESTORE_FROM
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import CONTAINER_NAME, CONTAINER_TYPE

VARIABLE: Final = "RESTORE_FROM"
OPERATION: Final = "kybernate.io/operation"  # the name of the operation that a restore is; counts of the node's root


@dataclass(frozen=True)
class Wanted:
    """An image that a container asks for. `by` names the annotation or the variable, for messages.

    `alone`: the container is named as the one that it is for; else it is for that of the pod which the image is of.
    """

    name: str
    by: str
    alone: bool = False

    @property
    def by_environment(self) -> bool:
        return self.by.endswith(VARIABLE)

    def is_for(self, container: str, source: str) -> bool:
        """Return whether an image of the container `source` of a pod is for this one; either may have no name.

        A pod's annotations are those of its init containers, its sidecars and what `kubectl debug` adds, too.
        """
        return self.alone or not (container and source) or container == source


def wanted_image(spec: Spec, config: Config) -> Wanted | None:
    """Return what the container asks to be restored from, None for a plain start.

    `kybernate.io/restore-from.NAME` for the container NAME of a pod comes before `kybernate.io/restore-from`, and that
    before the environment's RESTORE_FROM. A pod's annotations reach its sandbox, too, which is never restored.
    """
    if spec.annotations.get(CONTAINER_TYPE) == "sandbox":
        return None
    if config.pod_may_use(RESTORE_FROM):
        own = spec.annotations.get(CONTAINER_NAME)
        if own and (value := spec.annotations.get(f"{RESTORE_FROM}.{own}")):
            return Wanted(value, f"annotation {RESTORE_FROM}.{own}", alone=True)
        if value := spec.annotations.get(RESTORE_FROM):
            return Wanted(value, f"annotation {RESTORE_FROM}")
    value = spec.env(VARIABLE)
    return Wanted(value, f"environment variable {VARIABLE}", alone=True) if value else None
