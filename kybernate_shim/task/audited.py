"""What a container's operation means for the audit log: from the objects of a daemon to one line.

Loaded with the first operation of a daemon, or with the first Create that names a checkpoint image.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint.image.requested import wanted_image
from kybernate_shim.config import Config
from kybernate_shim.logs import Log
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.options import decode_options
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.audit import Audit, Decision, ImageRef, Verb, decision_of, write
from kybernate_shim.trust.requester import requester_of
from kybernate_shim.trust.rights import Right, may

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.image.manifest import Manifest
    from kybernate_shim.task.container import Container

NO_IMAGE = ImageRef()


def image_ref(path: Path, manifest: Manifest, digest: str) -> ImageRef:
    """Return what the audit log says of a checkpoint image."""
    source = manifest.source
    return ImageRef(str(path), manifest.id, digest, source.namespace, source.pod)


def audit(
    container: Container,
    verb: Verb,
    decision: Decision,
    image: ImageRef,
    log: Log,
    *,
    error: BaseException | None = None,
    seconds: float = 0,
) -> None:
    """Write the line of an operation on `container`. Never raises."""
    record = Audit(
        verb,
        decision,
        requester=requester_of(container.spec),
        task=container.id,
        containerd_namespace=container.namespace,
        image=image,
        reason="" if error is None else str(error) or type(error).__name__,
        seconds=seconds,
    )
    write(record, container.config, log)


def audit_refusal(request: wire.CreateTaskRequest, namespace: str, config: Config, log: Log, error: Exception) -> None:
    """Write the line of a Create that failed, if its container was to start from a checkpoint image. Never raises."""
    try:
        spec = Spec.read(Path(request.bundle))
    except Exception:  # noqa: BLE001  # a config.json that cannot be read names no image
        return
    named = _named_image(request, spec, config)
    if not named:
        return
    record = Audit(
        "restore",
        decision_of(error),
        requester=requester_of(spec),
        task=request.id,
        containerd_namespace=namespace,
        image=ImageRef(named),
        reason=str(error) or type(error).__name__,
    )
    write(record, config, log)


def _named_image(request: wire.CreateTaskRequest, spec: Spec, config: Config) -> str:
    """Return what was named as the image, as its requester wrote it; "" where none was named, or none that counts."""
    path = request.checkpoint
    with suppress(Exception):  # options that cannot be decoded are the error that is audited
        path = path or decode_options(request.options if request.HasField("options") else None).criu_image_path
    wanted = wanted_image(spec, config)
    if path or wanted is None:
        return path
    counts = not wanted.by_environment or may(requester_of(spec), Right.ENVIRONMENT, config)
    return wanted.name if counts else ""
