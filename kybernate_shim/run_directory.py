"""Where everything of a running node is that a reboot removes: sockets, leases, the arena, plain files of images."""

from __future__ import annotations

from pathlib import Path
from typing import Final

RUN: Final = Path("/run/kybernate")
ARRIVING: Final = RUN / "arriving"  # images that arrive from a store for a restore
# Of mounts for a restore; other users pass through it, as not through RUN.
SOURCES: Final = Path("/run/kybernate-sources")
TURNS: Final = SOURCES / "turns"  # of each container with a seat and the library, a file: see `turn_file`
DUMPS: Final = RUN / "dumps"  # files of dumps whose containers are frozen
IMAGES_SOCKET: Final = RUN / "images.sock"  # of the agent, for shims: images that are not on the node
SEATS_WAIT: Final = RUN / "seats-wait"  # is there where a container with a seat waits for an agent that is away


def turn_file(namespace: str, container: str, folder: Path = TURNS) -> Path:
    """Return the file that shows a container whether it is its seat's turn."""
    return folder / namespace / container
