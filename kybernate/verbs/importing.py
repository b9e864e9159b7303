"""Import: an archive or a directory on the node becomes one of its images.

What is half done has the operation's id in its name: it is found after a crash, and nothing else is taken for it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate.export.archives import manifest_in, unpack
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure, Invalid
from kybernate.node.images import STAGING
from kybernate.node.importing import admit, examine, target_of
from kybernate.node.privileges import privileges_of
from kybernate.node.trusted import known_keys, ring_of, signature_of
from kybernate.verbs.model import Observation, Operation, Result, Seen, Target
from kybernate.verbs.node import Node
from kybernate.verbs.places import absolute, disk_of, held
from kybernate.verbs.verb import Verb
from kybernate.verbs.verify import result_of
from kybernate_shim.checkpoint.image.manifest import MOST_BYTES, NAME, Manifest, ManifestInvalid, decode
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, CheckpointNotFound, Image, read_image
from kybernate_shim.config import Config
from kybernate_shim.errors import NoRoom
from kybernate_shim.linux.plain_files import read_plain
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import requester_of

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt


@dataclass(frozen=True)
class Import(Verb):
    """`path` is an archive or a directory; `name` and `namespace` are the image's new ones."""

    verb = "import"
    call = "Checkpoints/ImportImage"
    request = wire.ImportImageRequest

    path: str
    name: str = ""
    namespace: str = ""

    def resolve(self, node: Node, id: str) -> Target:
        source, config = Path(absolute(self.path)), Config.load()
        manifest, content = _foreign_manifest(source)
        inside = source.is_relative_to(config.checkpoint_root)
        known = inside or _is_signed(Image(source, manifest, content=content), config)
        claimed = manifest.source.namespace
        if claimed and not self.namespace and not known:
            raise Failure(
                f"{source} says that it is an image of namespace {claimed},"
                " and no key that is valid here has signed it",
                state="nothing was imported",
                advice=f"name the namespace whose pods may restore it: {claimed}",
            )
        name = self.name or ("" if source.is_dir() else source.name.removesuffix(".tar"))
        place = target_of(source, name, self.namespace or claimed, config)
        if place != source and os.path.lexists(place):
            raise Failure(f"{place} exists", state="nothing was imported", advice="give another name, or remove it")
        holds = dict.fromkeys((held(source), held(place)))
        writes = str(place) if place != source else ""
        return Target(
            image=str(place),
            archive=str(source),
            writes=writes,
            holds=tuple(holds),
            copies=tuple(dict.fromkeys((disk_of(source), disk_of(place)))),
        )

    async def execute(self, attempt: Attempt) -> Result:
        return await attempt.in_thread(lambda: self._imported(attempt))

    async def observe(self, node: Node, operation: Operation) -> Observation:
        return await asyncio.to_thread(_observed, operation)

    async def roll_back(self, node: Node, operation: Operation) -> str:
        return await asyncio.to_thread(_roll_back, operation)

    def _imported(self, attempt: Attempt) -> Result:
        operation, config = attempt.operation, Config.load()
        source, target = Path(operation.target.archive), Path(operation.target.image)
        archived = not source.is_dir()
        if archived:
            attempt.step("unpack")
            source = _unpacked(operation)
            _unpack(attempt, source)
        try:
            attempt.step("examine")
            examined = examine(source, attempt.counted("examine"))
            namespace = self._namespace(target, config)
            claimed = requester_of(Spec(examined.spec)).namespace
            if claimed and not namespace:
                raise Failure(
                    f"{source} is of a pod of namespace {claimed}",
                    state="nothing was imported",
                    advice=f"name the namespace whose pods may restore it: {claimed}",
                )
            try:
                privileges_of(examined.spec, examined.manifest)
            except Invalid as error:
                raise Failure(f"{source}: {error}", state="nothing was imported") from error
            attempt.step("import")
            move = archived or source.is_relative_to(config.checkpoint_root)
            count, staging = attempt.counted("import"), _staging(operation).name
            admit(examined, target, namespace, config, move=move, progress=count, staging=staging)
        finally:
            if archived:
                shutil.rmtree(source, ignore_errors=True)
        return result_of(read_image(target))

    def _namespace(self, target: Path, config: Config) -> str:
        """Return the namespace that was decided with the place."""
        return self.namespace or (target.parent.name if target.parent != config.checkpoint_root else "")


def _unpack(attempt: Attempt, directory: Path) -> None:
    archive = Path(attempt.operation.target.archive)
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unpack(archive, directory, attempt.counted("unpack"))
    except (OSError, NoRoom) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise Failure(f"{archive} cannot be unpacked: {error}", state="nothing was imported") from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _foreign_manifest(source: Path) -> tuple[Manifest, bytes]:
    if not source.is_dir():
        return manifest_in(source)
    try:
        content = read_plain(source / NAME, most=MOST_BYTES)
        return decode(content), content
    except (OSError, ManifestInvalid, RecursionError) as error:
        raise Failure(f"{source} is not a whole checkpoint image: {error}", state="nothing was imported") from error


def _is_signed(image: Image, config: Config) -> bool:
    return signature_of(image, ring_of(known_keys(config))).key is not None


def _observed(operation: Operation) -> Observation:
    if operation.target.writes and (image := _read(Path(operation.target.image))):
        _roll_back(operation)  # of the unpacked archive, from which the image was copied
        return Observation(Seen.SUCCEEDED, "its image is whole", result=result_of(image))
    if any(os.path.lexists(path) for path in _left(operation)):
        return Observation(Seen.HALF_DONE, "its copy is not whole")
    return Observation(Seen.ABSENT, "there is no image of it")


def _read(path: Path) -> Image | None:
    try:
        return read_image(path)
    except (CheckpointNotFound, CheckpointInvalid):
        return None


def _roll_back(operation: Operation) -> str:
    for path in _left(operation):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return "what it had written was removed"


def _left(operation: Operation) -> tuple[Path, ...]:
    """Return what a crash can leave."""
    return _staging(operation), _unpacked(operation)


def _staging(operation: Operation) -> Path:
    return Path(operation.target.image).with_name(f"{STAGING}{operation.id}")


def _unpacked(operation: Operation) -> Path:
    return Path(operation.target.image).with_name(f"{STAGING}{operation.id}-archive")
