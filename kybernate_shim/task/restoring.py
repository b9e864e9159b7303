"""Starts a container from an image, in place of the runtime's start."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint import loopback, restore
from kybernate_shim.checkpoint.arriving import claimed, source_of
from kybernate_shim.checkpoint.cgroup_lease import leased
from kybernate_shim.checkpoint.image.plaintext import plaintext
from kybernate_shim.checkpoint.image.requested import OPERATION
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.checkpoint.mounts.sources import follow_links
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.errors import Invalid
from kybernate_shim.linux.namespaces import CLONE_NEWNET, in_namespace
from kybernate_shim.linux.threads import as_long_as_wanted
from kybernate_shim.logs import Log
from kybernate_shim.oci import gpu_spec
from kybernate_shim.oci.spec import edit_spec
from kybernate_shim.task.checkpointing import work_directory
from kybernate_shim.task.fetch import container_image
from kybernate_shim.task.outcomes import operation_id
from kybernate_shim.trust.requester import POD_IMAGE, requester_of
from kybernate_shim.trust.rights import Right, may

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.gpu.accelerator import CudaAccelerator
    from kybernate_shim.task.container import Container


def operation_of_restore(container: Container, log: Log) -> str:
    """Return the name of the operation that restores the container, as its annotation has it.

    Only the node's root may set it: by a pod's annotation, its author could pass a restore off as another client's
    operation.
    """
    text = container.spec.annotations.get(OPERATION, "")
    if not text or requester_of(container.spec).is_tenant:
        return ""
    try:
        return operation_id(text)
    except Invalid as error:
        log.warning("operation.unnamed", task=container.id, error=str(error))
        return ""


async def restored_in_time(
    container: Container, image: Image, operation: Operation, log: Log, gpus: CudaAccelerator | None
) -> None:
    """Restore the container within `deadlines.restore`. Raises TimeoutError, and whatever the steps raise."""
    seconds = container.config.deadlines.restore
    try:
        async with claimed(image) as mine:
            operation.comes_from(source_of(mine))
            async with operation.within(seconds) as limit, plaintext(container, mine, operation) as plain:
                await _restore(container, plain, operation, log, gpus)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(
            f"restore of container {container.id} failed, nothing is left of it: it did not end within"
            f" {seconds:g} s; deadlines.restore sets the limit"
        ) from error


async def _restore(
    container: Container, image: Image, operation: Operation, log: Log, gpus: CudaAccelerator | None
) -> None:
    stdio = container.init.stdio
    assert stdio is not None
    work = work_directory(container.config, container.namespace, container.id, "restore")
    with leased(container.spec.cgroups_path, container.bundle.path), container.children.early_exits() as early:
        if gpus is not None:
            container.spec = await gpu_spec.prepare_restore(
                container.runtime,
                container.bundle,
                container.id,
                believe_environment=may(requester_of(container.spec), Right.VISIBLE_DEVICES, container.config),
            )
        container.spec = await asyncio.to_thread(follow_links, container.spec, container.bundle.path)
        digest = await _container_image(container, image)
        prepared = await restore.prepare(
            container, image, operation, log, work=work, accelerator=gpus, image_digest=digest
        )
        if prepared.inspection.internet_sockets and loopback.is_own(container.spec.document):
            container.spec = edit_spec(container.bundle.path, loopback.add_hook)
        async with gpus.expecting(image) if gpus is not None else nullcontext():
            try:
                async with restore.complete_or_gone(container):
                    await restore.run(container, prepared, operation, log, fds=stdio.fds, console=stdio.console_socket)
                    await stdio.started()
                    container.find_init()
                    await as_long_as_wanted(partial(prepared.settled.settle_late, container.init_pid))
                    await _switch_loopback_on(container, log)
                    if gpus is not None:
                        await gpus.attach(image, operation)
                    operation.commit()  # they compute: from here on, a kill ends them
            except BaseException:
                container.lose_init()
                raise
        container.restored(early)


async def _container_image(container: Container, image: Image) -> str:
    """Return the digest of a pod's container image, "" where it is unknown, or the image has none for the comparison.

    For others, the command that has created the container has compared it, or was told to take another.
    """
    if not image.manifest.source.image_digest or POD_IMAGE not in container.spec.annotations:
        return ""
    return await container_image(container.namespace, container.id)


async def _switch_loopback_on(container: Container, log: Log) -> None:
    """Do it where the network is the container's own. A failure is not fatal: its programs run without loopback."""
    if not loopback.is_own(container.spec.document):
        return
    network = Path(f"/proc/{container.init_pid}/ns/net")
    try:
        await asyncio.to_thread(in_namespace, network, CLONE_NEWNET, loopback.switch_on)
    except OSError as error:
        log.warning("loopback.not_enabled", error=str(error))
