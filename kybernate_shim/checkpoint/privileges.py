"""No process of an image may have more than the new container's config.json allows: looked at before CRIU starts.

CRIU gives every process the credentials that are in its images, with the privileges of the node's root. For the node's
root, who may start anything anyway, an excess is only logged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kybernate_shim.checkpoint.criu.confined import ImagePrivileges
from kybernate_shim.errors import Refused
from kybernate_shim.linux.credentials import is_nodes_namespace, login_of
from kybernate_shim.logs import Log
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.credentials import PrivilegeAllowance, Security, allowance_of, excess_of

SHOWN = 6


class PrivilegesExceeded(Refused):
    """Processes of the image would have more than the pod allows. The message has both values of each excess."""

    def __init__(self, findings: Sequence[str], state: str) -> None:
        rest = f"; and {len(findings) - SHOWN} more" if len(findings) > SHOWN else ""
        super().__init__(
            f"the image's processes have more privileges than the pod allows: {'; '.join(findings[:SHOWN])}{rest}."
            f" {state}. Restore it into a pod with the securityContext of the checkpointed one"
        )


def node_allowance(spec: Spec) -> PrivilegeAllowance:
    """Return what a config.json allows on this node: what it leaves open, a process inherits from the shim."""
    boost = max(0, -os.getpriority(os.PRIO_PROCESS, 0))
    nodes = [
        kind
        for one in spec.linux.get("namespaces") or ()
        if (path := one.get("path")) and _is_nodes(path, kind := str(one.get("type")))
    ]
    return allowance_of(spec, login=login_of(Path("/proc/self")), boost=boost, nodes=nodes)


def _is_nodes(path: str, kind: str) -> bool:
    try:
        return is_nodes_namespace(path, kind)
    except OSError:
        return False  # the runtime says what is wrong with it


def require_privileges(
    spec: Spec, recorded: Security, found: ImagePrivileges | None, log: Log
) -> PrivilegeAllowance | None:
    """Return what the container's processes may have, None where the requester may give them anything.

    `recorded` is what the manifest says of them, `found` what CRIU's images do: None where the requester has the right
    to any. Raises PrivilegesExceeded.
    """
    allowance = node_allowance(spec)
    if found is None:
        if findings := excess_of(recorded.processes, (), recorded, allowance):
            log.warning("restore.privileges_exceeded", excess=findings[:SHOWN], count=len(findings))
        return None
    if findings := excess_of(found.threads, found.held, recorded, allowance):
        raise PrivilegesExceeded(findings, "Nothing was restored")
    return allowance
