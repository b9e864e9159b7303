"""Which container an image becomes: decided from the image, the node's configuration and what the caller wants.

Nothing is created here. An image that is not trusted on this node is refused, and the refusal is audited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kybernate.node import restore as restoring
from kybernate.node.ahead import files_ahead
from kybernate.node.audited import audit, image_ref
from kybernate.node.containerd import Containerd
from kybernate.node.failure import Failure, Missing, Refused
from kybernate.node.privileges import in_lines, privileges_of
from kybernate.node.spec import for_restore, with_requester
from kybernate.node.trusted import require_named, require_trusted
from kybernate_shim.checkpoint.compat import FORCE
from kybernate_shim.checkpoint.image.manifest import Source
from kybernate_shim.checkpoint.image.requested import OPERATION
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import DEFAULT_PATH, Config
from kybernate_shim.oci.annotations import RESTORE_FROM

RUNTIME = "io.containerd.kybernate.v1"
SNAPSHOTTER = "overlayfs"


@dataclass(frozen=True)
class RestoreWish:
    """What a caller wants of the new container; what is empty is as the source had it, or as is usual.

    `id` is the container's, `namespace` containerd's, `image` the reference for its files. `operation` names the
    restore: the shim knows it by that name, and record and snapshot have it as a label.
    """

    id: str = ""
    namespace: str = ""
    image: str = ""
    runtime: str = RUNTIME
    snapshotter: str = SNAPSHOTTER
    force: bool = False
    operation: str = ""


def namespace_for(source: Source, wish: RestoreWish) -> str:
    """Return containerd's namespace for the new container."""
    return wish.namespace or ("k8s.io" if source.pod else "default")


def trusted_spec(image: Image) -> dict[str, Any]:
    """Return the saved spec of an image that may be restored. Raises Refused, with what the image asks for, Failure."""
    config = Config.load()
    if not config.pod_may_use(RESTORE_FROM):
        raise Refused(
            f"`annotations` in {DEFAULT_PATH} does not allow {RESTORE_FROM}",
            state="nothing was created",
            advice="allow it: without the annotation, the shim would start a new container",
        )
    try:
        require_trusted(image, config)
        spec = with_requester(restoring.saved_spec(image, config.encryption_key), image.manifest.source)
        require_named(image, spec, config)
    except Refused as error:
        audit("restore", "refused", image_ref(image.path, image.manifest, image.digest), config, reason=str(error))
        error.args = ("\n".join([str(error), *_requests(image)]),)
        raise
    return spec


def _requests(image: Image) -> list[str]:
    """Return in a few lines what the image's configuration asks for; none where it cannot be read."""
    try:
        asks = privileges_of(restoring.saved_spec(image), image.manifest)
    except Failure:
        return []
    return ["the image requests:", *in_lines(asks)]


def plan_of(
    containerd: Containerd, checkpoint: Image, saved: Mapping[str, Any], wish: RestoreWish
) -> restoring.RestorePlan:
    """Return the container that is to be created. Raises Missing, Refused and Failure."""
    source = checkpoint.manifest.source
    namespace = namespace_for(source, wish)
    reference = wish.image or source.image
    if not reference:
        raise Missing(
            f"{checkpoint.path} does not name the image that its container was created from",
            advice="name it with --image",
        )
    if not wish.image and not wish.force:
        _require_same_image(containerd, namespace, reference, source.image_digest)
    id = wish.id or source.container
    spec = for_restore(saved, namespace=namespace, id=id, image=checkpoint.path, operation=wish.operation)
    if wish.force:
        spec["annotations"][FORCE] = "true"
    labels = {OPERATION: wish.operation} if wish.operation else {}
    return restoring.RestorePlan(
        namespace, id, checkpoint.path, spec, reference, wish.runtime, wish.snapshotter, labels, files_ahead(checkpoint)
    )


def _require_same_image(containerd: Containerd, namespace: str, reference: str, digest: str) -> None:
    found = restoring.image_digest(containerd, namespace, reference)
    if digest and found and found != digest:
        raise Refused(
            f"{reference} is {found} on this node, but the container was created from {digest}",
            state="nothing was created",
            advice="pull the image by its digest and name it with --image, or override this with --force",
        )
