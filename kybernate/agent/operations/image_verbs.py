"""Verify, delete, import and export: the agent's own work on files, in threads.

What is half done has the operation's id in its name: it is found after a crash, and nothing else is taken for it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from kybernate.agent.operations.attempt import Attempt
from kybernate.agent.operations.model import Delete, Export, Import, Observation, Operation, Result, Seen, Verify
from kybernate.export.archives import export, unpack
from kybernate.node.deleting import delete_with_copy, trash_of
from kybernate.node.failure import Failure
from kybernate.node.images import STAGING
from kybernate.node.importing import IMAGE_NOT_WHOLE_ADVICE, NotImported, admit, examine
from kybernate.node.places import open_image
from kybernate.node.privileges import SpecOdd, privileges_of
from kybernate.node.verdict import problems_with
from kybernate.store.errors import ImageDamaged
from kybernate_shim.checkpoint.image.store import (
    CheckpointInvalid,
    CheckpointNotFound,
    Image,
    listed,
    read_image,
)
from kybernate_shim.config import Config
from kybernate_shim.errors import NoRoom
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.keys import KeyUnusable
from kybernate_shim.trust.requester import requester_of


class NotVerified(Failure):
    """The image could not be compared with its manifest."""


class ImageVerbs:
    """Carries out what needs no container."""

    async def execute(self, attempt: Attempt) -> Result:
        """See Executor.execute."""
        work = {Verify: _verify, Delete: _delete, Import: _import, Export: _export}[type(attempt.operation.arguments)]
        return await attempt.in_thread(lambda: work(attempt))

    async def observe(self, operation: Operation) -> Observation:
        """Return what became of it, from the files."""
        return await asyncio.to_thread(_observed, operation)

    async def roll_back(self, operation: Operation) -> str:
        """Remove what an import or an export has left."""
        return await asyncio.to_thread(_roll_back, operation)


def _verify(attempt: Attempt) -> Result:
    path = Path(attempt.operation.target.image)
    attempt.step("verify")
    try:
        problems = problems_with(path, Config.load(), attempt.counted("verify"))
    except (CheckpointNotFound, CheckpointInvalid, KeyUnusable, OSError) as error:
        raise NotVerified(f"{path} cannot be verified: {error}") from error
    if problems:
        raise ImageDamaged(f"{path} cannot be restored, {len(problems)} problems: {listed(problems)}")
    return _result(read_image(path))


def _delete(attempt: Attempt) -> Result:
    operation = attempt.operation
    attempt.step("delete")
    delete_with_copy(Path(operation.target.image), operation.id, Config.load())
    return Result(path=operation.target.image)


def _export(attempt: Attempt) -> Result:
    target = attempt.operation.target
    attempt.step("export")
    image, archive = open_image(target.image), Path(target.archive)
    size = export(image, archive, _archive_staging(attempt.operation), attempt.counted("export"))
    return Result(path=str(archive), image_id=image.manifest.id, manifest_digest=image.digest, bytes=size)


def _import(attempt: Attempt) -> Result:
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
        namespace = _namespace(operation, target, config)
        claimed = requester_of(Spec(examined.spec)).namespace
        if claimed and not namespace:
            raise NotImported(
                f"{source} is of a pod of namespace {claimed}",
                state="nothing was imported",
                advice=f"name the namespace whose pods may restore it: {claimed}",
            )
        try:
            privileges_of(examined.spec, examined.manifest)
        except SpecOdd as error:
            raise Failure(f"{source}: {error}", state="nothing was imported", advice=IMAGE_NOT_WHOLE_ADVICE) from error
        attempt.step("import")
        move = archived or source.is_relative_to(config.checkpoint_root)
        count, staging = attempt.counted("import"), _staging(operation).name
        admit(examined, target, namespace, config, move=move, progress=count, staging=staging)
    finally:
        if archived:
            shutil.rmtree(source, ignore_errors=True)
    return _result(read_image(target))


def _unpack(attempt: Attempt, directory: Path) -> None:
    archive = Path(attempt.operation.target.archive)
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unpack(archive, directory, attempt.counted("unpack"))
    except (OSError, NoRoom) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise NotImported(f"{archive} cannot be unpacked: {error}", state="nothing was imported") from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _namespace(operation: Operation, target: Path, config: Config) -> str:
    """Return the namespace that was decided with the place."""
    wanted = operation.arguments
    assert isinstance(wanted, Import)
    return wanted.namespace or (target.parent.name if target.parent != config.checkpoint_root else "")


def _observed(operation: Operation) -> Observation:
    match operation.arguments:
        case Delete():
            return _observed_delete(operation)
        case Export():
            return _observed_export(operation)
        case Import():
            return _observed_import(operation)
        case _:
            return Observation(Seen.ABSENT, "it leaves nothing behind")


def _observed_delete(operation: Operation) -> Observation:
    image = Path(operation.target.image)
    if not trash_of(image, operation.id).exists() and not image.exists():
        return Observation(Seen.SUCCEEDED, "the image is gone", result=Result(path=str(image)))
    return Observation(Seen.ABSENT, "not all of the image is gone")


def _observed_export(operation: Operation) -> Observation:
    archive = Path(operation.target.archive)
    if archive.exists():
        _archive_staging(operation).unlink(missing_ok=True)  # a second name of the same file
        result = Result(path=str(archive), bytes=archive.stat().st_size)
        return Observation(Seen.SUCCEEDED, "its archive is there", result=result)
    if _archive_staging(operation).exists():
        return Observation(Seen.HALF_DONE, "its archive is not whole")
    return Observation(Seen.ABSENT, "there is no archive of it")


def _observed_import(operation: Operation) -> Observation:
    if operation.target.writes and (image := _read(Path(operation.target.image))):
        _roll_back(operation)  # of the unpacked archive, from which the image was copied
        return Observation(Seen.SUCCEEDED, "its image is whole", result=_result(image))
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
    if isinstance(operation.arguments, Import):
        return _staging(operation), _unpacked(operation)
    return (_archive_staging(operation),)


def _archive_staging(operation: Operation) -> Path:
    archive = Path(operation.target.archive)
    return archive.with_name(f".{archive.name}.{operation.id}")


def _staging(operation: Operation) -> Path:
    return Path(operation.target.image).with_name(f"{STAGING}{operation.id}")


def _unpacked(operation: Operation) -> Path:
    return Path(operation.target.image).with_name(f"{STAGING}{operation.id}-archive")


def _result(image: Image) -> Result:
    manifest = image.manifest
    return Result(
        path=str(image.path),
        image_id=manifest.id,
        manifest_digest=image.digest,
        bytes=manifest.bytes,
        vram_bytes=sum(process.bytes for process in manifest.cuda_processes),
    )
