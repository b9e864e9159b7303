"""Delete: an image of this node, with the copy that stands for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.node.deleting import delete_with_copy, trash_of
from kybernate.node.failure import Failure, Refused
from kybernate.verbs.model import Observation, Operation, Result, Seen, Target
from kybernate.verbs.node import Node
from kybernate.verbs.places import held, image_here
from kybernate.verbs.verb import Verb
from kybernate_shim.config import Config

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt


@dataclass(frozen=True)
class Delete(Verb):
    """`force`: also where the image is pinned."""

    verb = "delete"
    call = "Checkpoints/DeleteImage"
    request = wire.DeleteImageRequest

    image: str
    force: bool = False

    def resolve(self, node: Node, id: str) -> Target:
        image, config = image_here(node, self.image), Config.load()
        roots = [root for root, _ in config.image_roots]
        if not any(image.is_relative_to(root) and image != root for root in roots):
            raise Failure(
                f"{image} lies neither below the checkpoint root nor below a trusted root",
                state="it is as it was",
                advice="remove the directory by hand",
            )
        if node.is_pinned(image) and not self.force:
            raise Refused(
                f"{image} is pinned", state="it is as it was", advice="take the pin from it, or delete it with --force"
            )
        return Target(image=str(image), holds=(held(image),))

    async def execute(self, attempt: Attempt) -> Result:
        return await attempt.in_thread(lambda: _deleted(attempt))

    async def observe(self, node: Node, operation: Operation) -> Observation:
        return await asyncio.to_thread(_observed, operation)


def _deleted(attempt: Attempt) -> Result:
    operation = attempt.operation
    attempt.step("delete")
    delete_with_copy(Path(operation.target.image), operation.id, Config.load())
    return Result(path=operation.target.image)


def _observed(operation: Operation) -> Observation:
    image = Path(operation.target.image)
    if not trash_of(image, operation.id).exists() and not image.exists():
        return Observation(Seen.SUCCEEDED, "the image is gone", result=Result(path=str(image)))
    return Observation(Seen.ABSENT, "not all of the image is gone")
