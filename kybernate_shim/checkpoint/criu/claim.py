"""How a bundle's config.json is made to name a CRIU configuration of ours, and keeps the choice of the node's root.

The runtime remembers the annotations with which a container was created; a checkpoint, which may come much later,
writes the file. CRIU takes a file that is not there for an empty one. `criu` says what is in it. A tenant has no
choice: CRIU runs as root, and some of its options run programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kybernate_shim.config import Config
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import requester_of
from kybernate_shim.trust.rights import Right, may

ANNOTATION: Final = "org.criu.config"
USERS_ANNOTATION: Final = "kybernate.io/criu-config"  # where the user's own choice is kept
RUNTIME_FILES: Final = {"runc": Path("/etc/criu/runc.conf"), "crun": Path("/etc/criu/crun.conf")}
FILE_NAME: Final = "kybernate-criu.conf"


def claim_config(document: dict[str, Any], path: Path) -> None:
    """Make the annotation in a parsed config.json name our file `path`, and keep root's choice in another one.

    For the moment of Create: the runtime remembers the annotations with which a container was created.
    """
    annotations = document.setdefault("annotations", {})
    tenant = requester_of(Spec(document)).is_tenant
    if tenant:
        annotations.pop(USERS_ANNOTATION, None)
    if annotations.get(ANNOTATION) == str(path):
        return
    if ANNOTATION in annotations and not tenant:
        annotations[USERS_ANNOTATION] = annotations[ANNOTATION]
    annotations[ANNOTATION] = str(path)


def without_claim(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as it was before `claim_config`."""
    annotations = {key: value for key, value in (document.get("annotations") or {}).items() if key != ANNOTATION}
    if USERS_ANNOTATION in annotations:
        annotations[ANNOTATION] = annotations.pop(USERS_ANNOTATION)
    return {**document, "annotations": annotations}


def users_file(spec: Spec, config: Config, runtime: str = "runc") -> Path | None:
    """Return the configuration file that would count without ours; None where root's annotation wants none."""
    chosen = spec.annotations.get(USERS_ANNOTATION)
    if chosen is None or not may(requester_of(spec), Right.CRIU_OPTIONS, config):
        return RUNTIME_FILES.get(runtime, RUNTIME_FILES["runc"])
    return Path(chosen) if chosen else None
