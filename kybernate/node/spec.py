"""The OCI spec of a container that is restored outside of Kubernetes: the source's, less what was its pod's alone.

A pod's container shares namespaces, mounts and a cgroup with its pod. Where those are gone it can only come back in a
new pod, which is said here before anything is created.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kybernate.node.failure import Failure
from kybernate_shim.address import GROUP_ANNOTATIONS

RESTORE_FROM = "kybernate.io/restore-from"
OF_THE_POD = ("io.kubernetes.cri.", "io.kubernetes.cri-o.", "io.container.manager")
NEEDED = ("network", "pid")  # namespaces that a dump leaves out where they came by path, so the restore must have them


class PodGone(Failure):
    """What the container shared with its pod is not on this node any more."""

    advice = f"restore it as a pod: same image, same mounts, and the annotation {RESTORE_FROM} with the image's path"


def for_restore(
    spec: Mapping[str, Any],
    *,
    namespace: str,
    id: str,
    image: Path,
    exists: Callable[[str], bool] = lambda path: Path(path).exists(),
) -> dict[str, Any]:
    """Return the spec of the new container `id` in containerd's `namespace`, restored from the directory `image`.

    Raises PodGone, naming all that is missing.
    """
    new: dict[str, Any] = copy.deepcopy(dict(spec))
    missing = [*_missing_namespaces(new, exists), *_missing_mounts(new, exists)]
    if missing:
        raise PodGone(
            "the container shared with its pod, or with its node, what is not here:\n"
            + "\n".join(f"  {thing}" for thing in missing),
            state="nothing was created",
        )
    for entry in _namespaces(new):
        if _stale(entry, exists):
            del entry["path"]
    new["annotations"] = _annotations(new.get("annotations") or {}) | {RESTORE_FROM: str(image)}
    linux = new.setdefault("linux", {})
    linux["cgroupsPath"] = _cgroup(str(linux.get("cgroupsPath") or ""), namespace, id)
    return new


def _namespaces(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list((spec.get("linux") or {}).get("namespaces") or ())


def _stale(entry: Mapping[str, Any], exists: Callable[[str], bool]) -> bool:
    """A pid may have been taken by another process since, so a path through /proc is never to be trusted."""
    path = entry.get("path") or ""
    return bool(path) and (path.startswith("/proc/") or not exists(path))


def _missing_namespaces(spec: Mapping[str, Any], exists: Callable[[str], bool]) -> list[str]:
    entries = [entry for entry in _namespaces(spec) if entry.get("type") in NEEDED and _stale(entry, exists)]
    return [f"{entry['type']} namespace {entry['path']}" for entry in entries]


def _missing_mounts(spec: Mapping[str, Any], exists: Callable[[str], bool]) -> list[str]:
    binds = [mount for mount in spec.get("mounts") or () if _is_bind(mount)]
    return [f"{mount['source']}, mounted at {mount['destination']}" for mount in binds if not exists(mount["source"])]


def _is_bind(mount: Mapping[str, Any]) -> bool:
    return mount.get("type") == "bind" or not {"bind", "rbind"}.isdisjoint(mount.get("options") or ())


def _annotations(old: Mapping[str, str]) -> dict[str, str]:
    """Leave out what would make the container a member of the old pod, whose shim it must not look for."""
    return {
        name: value for name, value in old.items() if name not in GROUP_ANNOTATIONS and not name.startswith(OF_THE_POD)
    }


def _cgroup(old: str, namespace: str, id: str) -> str:
    """Return a cgroup of the container's own, in the form (systemd's or a path) that the old one had."""
    return f"system.slice:kybernate:{id}" if old.count(":") == 2 else f"/{namespace}/{id}"
