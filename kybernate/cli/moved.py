"""What `suspend`, `resume` and `swap` say of the VRAM that they have moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kybernate.cli.output import printable, size

if TYPE_CHECKING:
    from kybernate_shim.messages.shim_pb2 import Arena, Step


def vram(bytes: int, spared_bytes: int = 0) -> str:
    """Say how much was moved, and how much of it needed no copy, in words."""
    unmoved = f", {size(spared_bytes)} of it unchanged or zeros" if spared_bytes else ""
    return f"{size(bytes)} of VRAM{unmoved}"


def arena_document(arena: Arena) -> dict[str, object]:
    """Return for JSON what a container got of the arena."""
    return {"asked": arena.asked, "bytes": arena.bytes, "reasons": list(arena.reasons)}


def arena_lines(arena: Arena, bytes: int) -> list[str]:
    """Say for people what of the `bytes` of VRAM did not go through the arena that the container asked for."""
    had = f"{size(arena.bytes)} of {size(bytes)}"
    return [f"arena: {had}: {printable(reason)}" for reason in arena.reasons]


def as_documents(steps: Sequence[Step]) -> list[dict[str, object]]:
    """Return the steps for JSON."""
    return [
        {"name": step.name, "seconds": step.seconds, "bytes": step.bytes, "spared_bytes": step.spared_bytes}
        for step in steps
    ]
