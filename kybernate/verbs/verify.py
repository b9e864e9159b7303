"""Verify: every byte of an image against its digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.node.verdict import problems_with
from kybernate.store.errors import ImageDamaged
from kybernate.verbs.model import Result, Target
from kybernate.verbs.node import Node
from kybernate.verbs.places import disk_of, held, image_here
from kybernate.verbs.verb import Verb
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, CheckpointNotFound, Image, listed, read_image
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt


@dataclass(frozen=True)
class Verify(Verb):
    """`image` is what is compared."""

    verb = "verify"
    call = "Checkpoints/VerifyImage"
    request = wire.VerifyImageRequest

    image: str

    def resolve(self, node: Node, id: str) -> Target:
        image = image_here(node, self.image)
        return Target(image=str(image), shares=(held(image),), copies=(disk_of(image),))

    async def execute(self, attempt: Attempt) -> Result:
        return await attempt.in_thread(lambda: _verified(attempt))


def _verified(attempt: Attempt) -> Result:
    path = Path(attempt.operation.target.image)
    attempt.step("verify")
    try:
        problems = problems_with(path, Config.load(), attempt.counted("verify"))
    except (CheckpointNotFound, CheckpointInvalid, Refused, OSError) as error:
        raise Failure(f"{path} cannot be verified: {error}") from error
    if problems:
        raise ImageDamaged(f"{path} cannot be restored, {len(problems)} problems: {listed(problems)}")
    return result_of(read_image(path))


def result_of(image: Image) -> Result:
    """Return the numbers of an image."""
    manifest = image.manifest
    return Result(
        path=str(image.path),
        image_id=manifest.id,
        manifest_digest=image.digest,
        bytes=manifest.bytes,
        vram_bytes=sum(process.bytes for process in manifest.cuda_processes),
    )
