"""The lines that the command line itself leaves in the node's audit log: imports, and restores that it refuses."""

from __future__ import annotations

import os
from pathlib import Path

from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.config import Config
from kybernate_shim.trust.audit import Audit, Decision, ImageRef, Verb, append
from kybernate_shim.trust.caller import OWN_SERVICE, Caller


def audit(verb: Verb, decision: Decision, image: ImageRef, config: Config, *, reason: str = "") -> str:
    """Append a line to the audit log; return why it could not be written, "" where it could."""
    if config.audit_log is None:
        return ""
    caller = Caller(OWN_SERVICE, verb.capitalize(), os.getuid(), os.getpid())
    try:
        append(config.audit_log, Audit(verb, decision, image=image, reason=reason, caller=caller).document())
    except OSError as error:
        return f"{config.audit_log}: {error}"
    return ""


def image_ref(path: Path, manifest: Manifest, digest: str) -> ImageRef:
    """Return what the audit log says of an image; `digest` is the manifest's."""
    source = manifest.source
    return ImageRef(str(path), manifest.id, digest, source.namespace, source.pod)
