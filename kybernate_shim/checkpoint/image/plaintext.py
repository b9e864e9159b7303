"""Where the plain files of an encrypted image are while CRIU writes or reads them: in memory, never on a disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kybernate_shim.checkpoint.cleanup import work_name
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Image, payload_names, require_space
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.config import Config
from kybernate_shim.linux.threads import entered

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.dump_request import DumpRequest
    from kybernate_shim.checkpoint.image.encrypted import CipherRun, Sealed
    from kybernate_shim.checkpoint.target import Target
    from kybernate_shim.vram_io.arrival import Arrival

T = TypeVar("T")


@asynccontextmanager
async def staged_for_dump(target: Target, request: DumpRequest) -> AsyncIterator[DumpRequest]:
    """Give the request with a directory in memory as its `image`, where the node encrypts; else the request itself.

    The directory of the caller is its `destination` then. Raises Refused and OSError.
    """
    if target.config.encryption_key is None:
        yield request
        return
    from kybernate_shim.errors import Refused
    from kybernate_shim.trust.encryption_keys import read_keys  # most nodes have no key

    try:
        read_keys(target.config.encryption_key)  # before anything is done to the container
    except Refused as error:
        raise Refused(f"{error}; no checkpoint was made, and nothing was changed") from None
    async with _staging(work_name(target.namespace, target.id, "checkpoint")) as directory:
        yield replace(request, image=directory, destination=request.image, encrypted=True)


def require_room(request: DumpRequest, needed: int) -> None:
    """Raise NoRoom unless there is room for `needed` bytes, plain and encrypted."""
    if request.destination is None:
        require_space(request.image, needed)
        return
    from kybernate_shim.checkpoint.image.plaintext_memory import require_memory

    require_memory(needed, "the checkpoint")
    require_space(request.destination, needed)


async def encrypted(request: DumpRequest, image: str, config: Config, operation: Operation) -> Sealed | None:
    """Encrypt all files of a staged image of id `image` to its destination; None for an image that stays plain.

    A cancelled caller continues once all threads have ended. Raises Refused, NoRoom and OSError.
    """
    if not request.encrypted:
        return None
    from kybernate_shim.checkpoint.image.encrypted import encrypt_files
    from kybernate_shim.trust.encryption_keys import read_keys

    assert config.encryption_key is not None
    assert request.destination is not None
    key = read_keys(config.encryption_key)[0]
    source, target, names = request.image, request.destination, payload_names(request.image)
    total = sum((source / name).stat().st_size for name in names)
    with operation.step("encrypt", total_bytes=total):
        return await _followed(
            operation, lambda run: encrypt_files(names, source, target, image=image, key=key, run=run)
        )


@asynccontextmanager
async def plaintext(target: Target, image: Image, operation: Operation) -> AsyncIterator[Image]:
    """Give the image with its files decrypted in memory as long as the context lasts; a plain image as it is.

    Raises Refused, NoRoom, OSError and CheckpointInvalid where a file is not what was
    encrypted.
    """
    manifest = image.manifest
    if manifest.encryption is None:
        yield image
        return
    from kybernate_shim.checkpoint.image import encrypted as work
    from kybernate_shim.checkpoint.image.plaintext_memory import require_memory
    from kybernate_shim.trust.encryption import EncryptionBroken

    data_key = work.data_key_of(manifest, target.config.encryption_key)
    require_memory(work.memory_bytes(manifest.files), f"the restore of {image.path}")
    async with _staging(work_name(target.namespace, target.id)) as directory:
        arrival = _arrival(image)
        later = {file.file for file in manifest.moved_files} if arrival is not None else set()
        here = [file for file in manifest.files if file.name not in later]

        def decrypt(run: CipherRun) -> None:
            work.decrypt_files(here, image.path, directory, image=manifest.id, data_key=data_key, run=run)

        try:
            with operation.step("decrypt", total_bytes=work.memory_bytes(here)):
                await _followed(operation, decrypt)
        except EncryptionBroken as error:
            raise CheckpointInvalid(f"{image.path}: {error}. Nothing was restored") from error
        with _rest_of(image, arrival, directory, data_key):
            plain = work.plain_manifest(manifest)
            yield replace(image, path=directory, manifest=plain, arriving=arrival is not None)


@contextmanager
def _rest_of(image: Image, arrival: Arrival | None, directory: Path, data_key: bytes) -> Iterator[None]:
    """Decrypt what of the image is still arriving, while the block lasts."""
    if arrival is None:
        yield
        return
    from kybernate_shim.checkpoint.image.arriving_plaintext import decrypting

    with decrypting(arrival, image.path, directory, image.manifest, data_key):
        yield


def _arrival(image: Image) -> Arrival | None:
    if not image.arriving:
        return None
    from kybernate_shim.vram_io.arrival import arrival_in  # few images arrive

    return arrival_in(image.path)


def require_key(image: Image, config: Config) -> None:
    """Raise Refused or CheckpointInvalid unless the node has the key of the image, if that is encrypted."""
    if image.manifest.encryption is not None:
        from kybernate_shim.checkpoint.image.encrypted import data_key_of

        data_key_of(image.manifest, config.encryption_key)


def _staging(name: str) -> AbstractAsyncContextManager[Path]:
    """Do as `memory_for_plaintext`, without making the event loop wait for the kernel to free gigabytes."""
    from kybernate_shim.checkpoint.image.plaintext_memory import memory_for_plaintext

    return entered(memory_for_plaintext(name))


async def _followed(operation: Operation, work: Callable[[CipherRun], T]) -> T:
    """Run `work` in a thread, show its progress in the operation, and end it when the caller is cancelled."""
    from kybernate_shim.checkpoint.image.counter import Counter
    from kybernate_shim.checkpoint.image.encrypted import CipherRun

    def show(done: int) -> None:
        operation.done_bytes = done

    run = CipherRun(Counter(show))
    task = asyncio.ensure_future(asyncio.to_thread(work, run))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        run.stop.set()
        await asyncio.wait({task})
        task.exception()  # Stopped, or what came before it: the caller has gone
        raise
