"""Which image a container asks to be restored from, by itself."""

from __future__ import annotations

from kybernate_shim.config import Config
from kybernate_shim.oci.spec import Spec

RESTORE_FROM = "kybernate.io/restore-from"
VARIABLE = "RESTORE_FROM"
CONTAINER_TYPE = "io.kubernetes.cri.container-type"
CONTAINER_NAME = "io.kubernetes.cri.container-name"


def requested_image(spec: Spec, config: Config) -> str:
    """Return the image directory that the container itself asks to be restored from, "" for a plain start.

    `kybernate.io/restore-from.NAME` for the container NAME of a pod, then `kybernate.io/restore-from`, then the
    environment's RESTORE_FROM. A pod's annotations reach its sandbox too, which is never restored.
    """
    if spec.annotations.get(CONTAINER_TYPE) == "sandbox":
        return ""
    name = ""
    if config.pod_may_use(RESTORE_FROM):
        own = f"{RESTORE_FROM}.{spec.annotations.get(CONTAINER_NAME, '')}"
        name = spec.annotations.get(own, spec.annotations.get(RESTORE_FROM, ""))
    name = name or spec.env(VARIABLE) or ""
    return str(config.checkpoint_root / name) if name else ""
