"""How a bundle's config.json is made to name a CRIU configuration of ours, and keeps the user's choice.

The runtime remembers the annotations with which a container was created; a checkpoint, which may come much later,
writes the file. CRIU takes a file that is not there for an empty one. `criu` says what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ANNOTATION: Final = "org.criu.config"
USERS_ANNOTATION: Final = "kybernate.io/criu-config"  # where the user's own choice is kept
RUNTIME_FILES: Final = {"runc": Path("/etc/criu/runc.conf"), "crun": Path("/etc/criu/crun.conf")}
FILE_NAME: Final = "kybernate-criu.conf"


def claim_config(document: dict[str, Any], path: Path) -> None:
    """Make the annotation in a parsed config.json name our file `path`, and keep the user's choice beside it.

    For the moment of Create: the runtime remembers the annotations with which a container was created.
    """
    annotations = document.setdefault("annotations", {})
    if annotations.get(ANNOTATION) == str(path):
        return
    if ANNOTATION in annotations:
        annotations[USERS_ANNOTATION] = annotations[ANNOTATION]
    annotations[ANNOTATION] = str(path)


def without_claim(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as it was before `claim_config`."""
    annotations = {key: value for key, value in (document.get("annotations") or {}).items() if key != ANNOTATION}
    if USERS_ANNOTATION in annotations:
        annotations[ANNOTATION] = annotations.pop(USERS_ANNOTATION)
    return {**document, "annotations": annotations}


def users_file(annotations: Mapping[str, str], runtime: str = "runc") -> Path | None:
    """Return the configuration file that would count without ours; None where the user wants none."""
    chosen = annotations.get(USERS_ANNOTATION)
    if chosen is None:
        return RUNTIME_FILES.get(runtime, RUNTIME_FILES["runc"])
    return Path(chosen) if chosen else None
