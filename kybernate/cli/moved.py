"""What `suspend`, `resume` and `swap` say of the VRAM that they have moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kybernate.cli.output import printable, size

if TYPE_CHECKING:
    from kybernate_shim.messages.shim_pb2 import Arena, ResumeResponse, Step, SuspendResponse


def vram(reply: SuspendResponse | ResumeResponse) -> str:
    """Say how much was moved, and how much of it needed no copy, in words."""
    spared = sum(step.spared_bytes for step in reply.steps)
    unmoved = f", {size(spared)} of it unchanged or zeros" if spared else ""
    return f"{size(reply.vram_bytes)} of VRAM{unmoved}"


def arena_document(arena: Arena) -> dict[str, object]:
    """Return for JSON what a container got of the arena."""
    return {"asked": arena.asked, "bytes": arena.bytes, "reasons": list(arena.reasons)}


def arena_lines(reply: SuspendResponse) -> list[str]:
    """Say for people what did not go through the arena that the container asked for."""
    had = f"{size(reply.arena.bytes)} of {size(reply.vram_bytes)}"
    return [f"arena: {had}: {printable(reason)}" for reason in reply.arena.reasons]


def as_documents(steps: Sequence[Step]) -> list[dict[str, object]]:
    """Return the steps for JSON."""
    return [
        {"name": step.name, "seconds": step.seconds, "bytes": step.bytes, "spared_bytes": step.spared_bytes}
        for step in steps
    ]
