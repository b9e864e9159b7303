"""Shows what a checkpoint image asks for, before an administrator decides about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from kybernate.cli.output import INDENT, show_columns
from kybernate.node.privileges import HostMount, SpecPrivileges, process_rows
from kybernate_shim.checkpoint.image.manifest import Manifest


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
