"""Shows what a checkpoint image asks for, before an administrator decides about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from kybernate.cli.output import INDENT, show_columns
from kybernate.node.failure import Failure
from kybernate.node.privileges import HostMount, SpecPrivileges, privileges_of, process_rows
from kybernate.node.restore import saved_spec
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.image.store import Image

SHOWN = 12
NOTHING = "none"


def summary(image: Image) -> str:
    """Return in a few lines what the image's configuration asks for; "" where it cannot be read."""
    try:
        asks = privileges_of(saved_spec(image), image.manifest)
    except Failure:
        return ""
    lines = [f"{INDENT}{name}: {value}" for name, value in fields(asks).items()]
    lines += [f"{INDENT}mount of the node: {mount.source} at {mount.destination}" for mount in asks.mounts[:SHOWN]]
    if len(asks.mounts) > SHOWN:
        lines.append(f"{INDENT}… and {len(asks.mounts) - SHOWN} mounts more")
    return "\n".join(["the image requests:", *lines])


def fields(asks: SpecPrivileges) -> dict[str, str]:
    """Return what the configuration asks for, each in one line."""
    return {
        "user": asks.user,
        "capabilities": _listed(asks.capabilities),
        "no_new_privs": "yes" if asks.no_new_privs else "no",
        "seccomp": asks.seccomp or NOTHING,
        "AppArmor or SELinux": asks.confinement or NOTHING,
        "devices": _listed(asks.devices),
        **({"unusual": "; ".join(asks.warnings)} if asks.warnings else {}),
    }


def mount_rows(mounts: Iterable[HostMount]) -> list[tuple[str, ...]]:
    """Return rows of a table: destination, source, access, and where the mount is listed."""
    return [(one.destination, one.source, "rw" if one.writable else "ro", one.kind) for one in mounts]


def show_processes(manifest: Manifest) -> None:
    """Print the processes' privileges, where the image records them."""
    if rows := process_rows(manifest):
        typer.echo("\nprivileges of processes:")
        header = ("PID", "NAME", "UIDS", "CAPABILITIES", "NO_NEW_PRIVS", "SECCOMP")
        show_columns(header, rows, indent=INDENT)


def documented(asks: SpecPrivileges) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "user": asks.user,
        "capabilities": list(asks.capabilities),
        "no_new_privs": asks.no_new_privs,
        "seccomp": asks.seccomp,
        "label": asks.confinement,
        "devices": list(asks.devices),
        "hooks": list(asks.hooks),
        "mounts": [vars(mount) for mount in asks.mounts],
        "unusual": list(asks.warnings),
    }


def _listed(items: tuple[str, ...]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f"{', '.join(items[:SHOWN])}{more}" if items else NOTHING
