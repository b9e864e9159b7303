"""Export: an image into an archive on the node.

An archive that is half written has the operation's id in its name: it is found after a crash, and nothing else is taken
for it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate.export.archives import export
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Invalid, Refused
from kybernate.node.places import open_image
from kybernate.verbs.model import Observation, Operation, Result, Seen, Target
from kybernate.verbs.node import Node
from kybernate.verbs.places import absolute, disk_of, held, image_here, with_place
from kybernate.verbs.verb import Verb

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt


@dataclass(frozen=True)
class Export(Verb):
    """`path` is the archive that is written."""

    verb = "export"
    call = "Checkpoints/ExportImage"
    request = wire.ExportImageRequest

    image: str
    path: str

    def resolve(self, node: Node, id: str) -> Target:
        image, archive = image_here(node, self.image), Path(absolute(self.path))
        if os.path.lexists(archive):
            raise Refused(f"{archive} exists", state="nothing was exported")
        if not archive.parent.is_dir():
            raise Invalid(f"{archive.parent} is not a directory", state="nothing was exported")
        target = Target(image=str(image), archive=str(archive), shares=(held(image),), copies=(disk_of(image),))
        return with_place(target, writes=archive)

    async def execute(self, attempt: Attempt) -> Result:
        return await attempt.in_thread(lambda: _exported(attempt))

    async def observe(self, node: Node, operation: Operation) -> Observation:
        return await asyncio.to_thread(_observed, operation)

    async def roll_back(self, node: Node, operation: Operation) -> str:
        await asyncio.to_thread(_staging(operation).unlink, missing_ok=True)
        return "what it had written was removed"


def _exported(attempt: Attempt) -> Result:
    target = attempt.operation.target
    attempt.step("export")
    image, archive = open_image(target.image), Path(target.archive)
    size = export(image, archive, _staging(attempt.operation), attempt.counted("export"))
    return Result(path=str(archive), image_id=image.manifest.id, manifest_digest=image.digest, bytes=size)


def _observed(operation: Operation) -> Observation:
    archive = Path(operation.target.archive)
    if archive.exists():
        _staging(operation).unlink(missing_ok=True)  # a second name of the same file
        result = Result(path=str(archive), bytes=archive.stat().st_size)
        return Observation(Seen.SUCCEEDED, "its archive is there", result=result)
    if _staging(operation).exists():
        return Observation(Seen.HALF_DONE, "its archive is not whole")
    return Observation(Seen.ABSENT, "there is no archive of it")


def _staging(operation: Operation) -> Path:
    archive = Path(operation.target.archive)
    return archive.with_name(f".{archive.name}.{operation.id}")
