"""The OCI spec of a container that is restored outside of Kubernetes: the source's, less what was its pod's alone.

A pod's container shares namespaces, mounts and a cgroup with its pod. Where those are gone it can only come back in a
new pod, which is said here before anything is created.

What a pod's author chose must not become a choice of root's. So the spec is used as follows.

| part of the spec | of every container | of a pod's container, in addition |
|---|---|---|
| `root.path` | replaced: `/` would make the node's root filesystem the container's | |
| `linux.cgroupsPath` | replaced: it could be the cgroup of another container | |
| `linux.namespaces` with a path | paths in /proc are dropped: another process may have the pid now | all paths are dropped, or refused if CRIU needs them: they lead to namespaces of others |
| `annotations` | those that name CRIU's options or an image are dropped | all are dropped but `KEPT` and the marks: runtimes take orders from annotations |
| CRI's marks | | kept: the shim gives the container a tenant's rights, no more (trust/rights.py) |
| `hooks` | kept: root's own | dropped but NVIDIA's, without their environment: a hook runs as root on the node |
| `mounts` of the node | must exist | refused if another user could put a link in the place of the source |
| `linux.netDevices`, `linux.intelRdt` | kept | dropped: an interface or a group of the node that may be another pod's now |
| `process`: user, capabilities, `noNewPrivileges`, AppArmor and SELinux; `linux`: seccomp, masked paths, devices and their rules, id maps, limits | kept as it is: the container has what it had, no more | |
"""

# ruff: noqa: E501  (the table)
from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kybernate.node.failure import Failure
from kybernate_shim.address import GROUP_ANNOTATIONS
from kybernate_shim.checkpoint.criu.claim import USERS_ANNOTATION
from kybernate_shim.checkpoint.image.manifest import Source
from kybernate_shim.checkpoint.image.requested import OPERATION
from kybernate_shim.errors import Refused
from kybernate_shim.oci.annotations import RESTORE_FROM
from kybernate_shim.oci.spec import CDI_ANNOTATION, GPU_HOOKS, Spec
from kybernate_shim.trust.places import require_private
from kybernate_shim.trust.requester import (
    CONTAINER_NAME,
    CONTAINER_TYPE,
    POD_NAME,
    POD_NAMESPACE,
    POD_UID,
    requester_of,
)

OF_THE_POD = ("io.kubernetes.cri.", "io.kubernetes.cri-o.", "io.container.manager")
MARKS = (CONTAINER_TYPE, POD_NAMESPACE, POD_NAME, POD_UID, CONTAINER_NAME)
# The author of a pod chose these, and the new container is root's own, whose choices count for more.
CHOSEN = ("org.criu.config", USERS_ANNOTATION, RESTORE_FROM, OPERATION)
# How the container is suspended and resumed; `kybernate.io/force` is not among them, since it overrides refusals.
KEPT = (
    *("kybernate.io/tcp", "kybernate.io/pause", "kybernate.io/arena", "kybernate.io/gpu-map"),
    *("kybernate.io/vram", "kybernate.io/wake-on-use"),
)
NEEDED = ("network", "pid")  # namespaces that a dump leaves out where they came by path, so the restore must have them
ROOTFS = "rootfs"  # in the bundle, where containerd mounts the container's root filesystem
OTHERS_NOW = ("netDevices", "intelRdt")


def for_restore(
    spec: Mapping[str, Any],
    *,
    namespace: str,
    id: str,
    image: Path,
    operation: str = "",
    exists: Callable[[str], bool] = lambda path: Path(path).exists(),
    fixed: Callable[[str], bool] = lambda path: _is_fixed(Path(path)),
) -> dict[str, Any]:
    """Return the spec of the new container `id` in containerd's `namespace`, restored from the directory `image`.

    `operation` is the caller's name for the restore; the shim passes it on only for a container that is no pod's.
    `fixed` returns whether only root can replace what lies at a path. Raises Failure, naming all that is missing.
    """
    new: dict[str, Any] = copy.deepcopy(dict(spec))
    tenants = requester_of(Spec(spec)).is_tenant
    stale = _StalePaths(exists, tenants=tenants)
    missing = [*_missing_namespaces(new, stale), *_missing_mounts(new, exists)]
    if tenants:
        missing += _replaceable_mounts(new, exists, fixed)
    if missing:
        raise Failure(
            "the container shared with its pod or its node what does not exist here:\n"
            + "\n".join(f"  {thing}" for thing in missing),
            state="nothing was created",
            advice=f"restore it as a pod: same image, same mounts, and the annotation {RESTORE_FROM} with the image's name",
        )
    for entry in _namespaces(new):
        if stale(entry):
            del entry["path"]
    new["annotations"] = _annotations(new.get("annotations") or {}, tenants=tenants) | {RESTORE_FROM: str(image)}
    if operation:
        new["annotations"][OPERATION] = operation
    new["root"] = {**(new.get("root") or {}), "path": ROOTFS}
    linux = new.setdefault("linux", {})
    linux["cgroupsPath"] = _cgroup(str(linux.get("cgroupsPath") or ""), namespace, id)
    if tenants:
        _disarm(new, fixed)
    return new


def with_requester(spec: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the spec with CRI's marks of the pod that the manifest names, if it names a namespace or the spec has any.

    The manifest is signed, and an import may have given the image to another namespace.
    """
    if not source.namespace and not requester_of(Spec(spec)).is_tenant:
        return dict(spec)
    marks = {
        CONTAINER_TYPE: "container",
        POD_NAMESPACE: source.namespace,
        POD_NAME: source.pod,
        CONTAINER_NAME: source.name,
    }
    return {**spec, "annotations": {**(spec.get("annotations") or {}), **marks}}


class _StalePaths:
    """Which namespaces' paths must not be used.

    A pid may have been taken by another process since, so a path through /proc is never to be trusted. Of a pod's
    container no path is: what is there under the same name now is another pod's, or the node's.
    """

    def __init__(self, exists: Callable[[str], bool], *, tenants: bool) -> None:
        self._exists, self._tenants = exists, tenants

    def __call__(self, entry: Mapping[str, Any]) -> bool:
        path = entry.get("path") or ""
        return bool(path) and (self._tenants or path.startswith("/proc/") or not self._exists(path))


def _namespaces(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list((spec.get("linux") or {}).get("namespaces") or ())


def _missing_namespaces(spec: Mapping[str, Any], stale: _StalePaths) -> list[str]:
    entries = [entry for entry in _namespaces(spec) if entry.get("type") in NEEDED and stale(entry)]
    return [f"{entry['type']} namespace {entry['path']}" for entry in entries]


def _binds(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for mount in spec.get("mounts") or ():
        if mount.get("type") == "bind" or not {"bind", "rbind"}.isdisjoint(mount.get("options") or ()):
            yield mount


def _missing_mounts(spec: Mapping[str, Any], exists: Callable[[str], bool]) -> list[str]:
    return [_mounted(mount) for mount in _binds(spec) if not exists(mount["source"])]


def _replaceable_mounts(
    spec: Mapping[str, Any], exists: Callable[[str], bool], fixed: Callable[[str], bool]
) -> list[str]:
    return [
        f"{_mounted(mount)}: another user can replace it by a link"
        for mount in _binds(spec)
        if exists(mount["source"]) and not fixed(mount["source"])
    ]


def _mounted(mount: Mapping[str, Any]) -> str:
    return f"{mount['source']}, mounted at {mount['destination']}"


def _is_fixed(path: Path) -> bool:
    """Return whether only root can replace what lies at `path`, which is no link."""
    if not path.is_absolute() or ".." in path.parts or path.is_symlink():
        return False
    try:
        require_private(path.parent)
    except (Refused, OSError):
        return False
    return True


def _annotations(old: Mapping[str, str], *, tenants: bool) -> dict[str, str]:
    """Leave out what would make the container a member of the old pod, whose shim it must not look for."""
    if tenants:
        kept = (*KEPT, *MARKS)
        return {name: value for name, value in old.items() if name in kept or name.startswith(CDI_ANNOTATION)}
    left_out = (*OF_THE_POD, *CHOSEN)
    return {
        name: value for name, value in old.items() if name not in GROUP_ANNOTATIONS and not name.startswith(left_out)
    }


def _disarm(spec: dict[str, Any], fixed: Callable[[str], bool]) -> None:
    """Take from a pod's spec what would act on the node as root, or belongs to another pod by now."""
    hooks = {
        stage: [_without_environment(hook) for hook in listed or () if _is_nvidias(hook, fixed)]
        for stage, listed in (spec.pop("hooks", None) or {}).items()
    }
    if any(hooks.values()):
        spec["hooks"] = {stage: listed for stage, listed in hooks.items() if listed}
    for name in OTHERS_NOW:
        spec["linux"].pop(name, None)


def _is_nvidias(hook: Mapping[str, Any], fixed: Callable[[str], bool]) -> bool:
    path = str(hook.get("path") or "")
    return os.path.basename(path) in GPU_HOOKS and fixed(path)  # noqa: PTH119  # a text that may not be a path


def _without_environment(hook: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in hook.items() if name != "env"}


def _cgroup(old: str, namespace: str, id: str) -> str:
    """Return a cgroup of the container's own, in the form (systemd's or a path) that the old one had."""
    return f"system.slice:kybernate:{id}" if old.count(":") == 2 else f"/{namespace}/{id}"
