"""The mounts of a container as the manifest of its image describes them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from kybernate_shim.checkpoint.image.manifest import ImageMount
from kybernate_shim.checkpoint.mounts.configured import declared, is_bind, located
from kybernate_shim.checkpoint.mounts.hooks import HookMount
from kybernate_shim.oci.spec import Spec

VOLUME: Final = re.compile(r"/volumes/(?:kubernetes\.io~)?([^/]+)/|/volume-(subpaths)/")


def describe_mounts(spec: Spec, rootfs: Path, found: Iterable[HookMount]) -> tuple[ImageMount, ...]:
    """Return the mounts of a container for the manifest: config.json's, and those that hooks added.

    Kinds: `pseudo` (the kernel's view of things), `private` (content in the image), `host` (a directory or file of the
    node), the name of a Kubernetes volume (`empty-dir`, `configmap`, `csi`, …), `hook`.
    """
    listed = [_describe(mount, destination) for mount, destination in located(spec, rootfs)]
    hooks = [ImageMount(hook.destination, hook.type, "hook", hook.source) for hook in found if hook.action != "drop"]
    return (*listed, *hooks)


def _describe(mount: Mapping[str, Any], destination: str) -> ImageMount:
    options = tuple(map(str, mount.get("options") or ()))
    source = str(mount.get("source") or "")
    if not is_bind(mount):
        kind = str(mount.get("type") or "")
        return ImageMount(destination, kind, "private" if kind == "tmpfs" else "pseudo", "", options)
    volume = VOLUME.search(source)
    kind = next(filter(None, volume.groups())) if volume else "host"
    return ImageMount(destination, "bind", kind, source, options, _through_links(mount, destination))


def _through_links(mount: Mapping[str, Any], destination: str) -> str:
    return "" if os.path.normpath(declared(mount)) == destination else declared(mount)
