"""The author of a container's requests: the only place that distinguishes a tenant's containers from root's.

containerd's CRI plugin marks every container and sandbox that it creates with its own annotations, which a pod
cannot remove. The author of such a pod chose its annotations, environment, image and the content of its volumes, and
is not trusted with anything else. A container without these marks was made by a client of containerd's socket, which
only root can open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kybernate_shim.oci.spec import Spec

Kind = Literal["tenant", "node"]

# containerd's marks; those of CRI-O, and the kubelet's labels as other runtimes write them, also mark a tenant.
CRI: Final = ("io.kubernetes.cri.", "io.kubernetes.cri-o.", "io.kubernetes.pod.", "io.container.manager")
CONTAINER_TYPE: Final = "io.kubernetes.cri.container-type"
POD_NAMESPACE: Final = "io.kubernetes.cri.sandbox-namespace"
POD_NAME: Final = "io.kubernetes.cri.sandbox-name"
POD_UID: Final = "io.kubernetes.cri.sandbox-uid"
CONTAINER_NAME: Final = "io.kubernetes.cri.container-name"
SANDBOX_ID: Final = "io.kubernetes.cri.sandbox-id"
POD_IMAGE: Final = "io.kubernetes.cri.image-name"  # one reference, even if there are several


@dataclass(frozen=True)
class Requester:
    """The author of a container's configuration. For `node`, which is the node's root, the other fields are empty.

    `namespace`, `pod` and `uid` are Kubernetes' words for the pod, `container` is the name of the container in it.
    `sandbox` is the id of the pod's sandbox; without it, root has made the container from the image of a pod, as
    `kybernate restore` does, with a tenant's rights and no pod.
    """

    kind: Kind
    namespace: str = ""
    pod: str = ""
    uid: str = ""
    container: str = ""
    sandbox: str = ""

    @property
    def is_tenant(self) -> bool:
        return self.kind == "tenant"

    def __str__(self) -> str:
        if not self.is_tenant:
            return "the node's root"
        return f"pod {self.namespace}/{self.pod}" + (f", container {self.container}" if self.container else "")


NODE: Final = Requester("node")


def requester_of(spec: Spec) -> Requester:
    """Return the author of annotations, environment, image and volumes of the container with this config.json."""
    notes = spec.annotations
    if not any(name.startswith(CRI) for name in notes):
        return NODE
    return Requester(
        "tenant",
        namespace=notes.get(POD_NAMESPACE, ""),
        pod=notes.get(POD_NAME, ""),
        uid=notes.get(POD_UID, ""),
        container=notes.get(CONTAINER_NAME, ""),
        sandbox=notes.get(SANDBOX_ID, ""),
    )
