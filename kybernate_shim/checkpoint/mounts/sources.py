"""Sources of bind mounts that are links: a runtime's start follows them, and CRIU's restore does not.

CRIU copies a source's mount by open_tree(2) without following a link at its end, and so would mount the link itself.
The restore is therefore given what the link leads to, in the daemon's mount namespace, which is the runtime's too: what
a plain start of the same configuration would mount.
Source: CRIU's mount-v2.c, __do_bind_mount_v2.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kybernate_shim.checkpoint.mounts.configured import is_bind
from kybernate_shim.oci.spec import Spec, edit_spec


def followed(path: str) -> str:
    """Return what a link leads to; the path itself where it is none, or leads to no path, as those in /proc do."""
    link = Path(path)
    try:
        if not link.is_symlink():
            return path
        target = link.resolve(strict=True)
        return str(target) if target.samefile(link) else path
    except (OSError, ValueError, RuntimeError):
        return path


def follow_links(spec: Spec, bundle: Path) -> Spec:
    """Write the targets of links into config.json as the sources of its bind mounts, and return it.

    Raises Invalid and OSError.
    """
    if not list(_linked(spec.document, bundle)):
        return spec
    return edit_spec(bundle, partial(_follow, bundle=bundle))


def _follow(document: dict[str, Any], bundle: Path) -> None:
    for mount, target in _linked(document, bundle):
        mount["source"] = target


def _linked(document: Any, bundle: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the bind mounts whose source is a link, each with the link's target. A relative one is the bundle's."""
    for mount in document.get("mounts") or ():
        source = str(bundle / str(mount.get("source") or "")) if is_bind(mount) else ""
        if (target := followed(source)) != source:
            yield mount, target
