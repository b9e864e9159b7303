"""From a Create request to a container object: what it is made of is read and decided here, nothing is started yet."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kybernate_shim.checkpoint.criu.claim import FILE_NAME, claim_config
from kybernate_shim.checkpoint.image.requested import wanted_image
from kybernate_shim.config import Config
from kybernate_shim.gpu.nccl_safe import NCCL_SAFE, NCCL_SAFE_ANNOTATION
from kybernate_shim.linux.children import Children
from kybernate_shim.logs import Log
from kybernate_shim.messages import events_pb2 as events
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.annotations import RESTORE_FROM, require_unmistaken
from kybernate_shim.oci.bundle import Bundle, CleanupRecord
from kybernate_shim.oci.gpu_spec import set_environment
from kybernate_shim.oci.options import RuntimeOptions, decode_options, effective_config
from kybernate_shim.oci.preload_spec import DESTINATION, LIBRARY, add_library, wants_library
from kybernate_shim.oci.runtime import Runtime, runtime_environment
from kybernate_shim.oci.select import choose_runtime, resolve_cli
from kybernate_shim.oci.spec import Spec, edit_spec
from kybernate_shim.task.container import Container, Publish
from kybernate_shim.task.stdio import StdioConfig
from kybernate_shim.trust.requester import CONTAINER_TYPE, requester_of
from kybernate_shim.trust.rights import Right, may

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.image.store import Image


SKIPPED = "/kybernate/shim/skipped"  # topic of the event about a container that is not the one that an image is of


async def prepare(
    request: wire.CreateTaskRequest, *, namespace: str, config: Config, log: Log, **parts: Any
) -> Container:
    """Do as `_prepare`, and audit the decision on a container that is to start from a checkpoint image."""
    try:
        container = await _prepare(request, namespace=namespace, config=config, log=log, **parts)
    except Exception as error:
        from kybernate_shim.task.audited import audit_refusal  # a Create seldom fails

        audit_refusal(request, namespace, config, log, error)
        raise
    if container.image is not None:
        from kybernate_shim.task.audited import audit, image_ref  # most containers start from none

        image = container.image
        audit(container, "restore", "allowed", image_ref(image.path, image.manifest, image.digest), log)
    return container


async def _prepare(
    request: wire.CreateTaskRequest,
    *,
    namespace: str,
    config: Config,
    children: Children,
    publish: Publish,
    log: Log,
) -> Container:
    """Decide runtime, options and settings of the container in `request`, and record them in its bundle for `delete`.

    `config` is the node's; the container's own options are laid over it. Raises UnsupportedOptions, ConfigInvalid,
    SpecInvalid, AnnotationMistaken, RuntimeMissing, CheckpointNotFound, CheckpointInvalid, TimeoutError where the image
    cannot be read in time, and OSError when the bundle's disk is full.
    """
    bundle = Bundle(Path(request.bundle))
    # The runtime remembers the annotation of CRIU's configuration from now on; the file comes with a checkpoint.
    spec = edit_spec(bundle.path, partial(claim_config, path=bundle.path / FILE_NAME))
    options = decode_options(request.options if request.HasField("options") else None)
    config = effective_config(config, options)
    if config.pods_choice(spec.annotations, NCCL_SAFE_ANNOTATION) == "true":
        spec = edit_spec(bundle.path, partial(set_environment, variables=NCCL_SAFE))
    for warning in config.warnings:
        log.warning("config.ignored", task=request.id, error=warning)
    if config.pod_may_use(RESTORE_FROM) and spec.annotations.get(CONTAINER_TYPE) != "sandbox":
        require_unmistaken(spec.annotations)
    image = None
    skipped: dict[str, str] = {}
    if request.checkpoint or options.criu_image_path or wanted_image(spec, config) is not None:
        # Not on the event loop: a disk may not answer, and the pod's other containers must be served meanwhile.
        async with asyncio.timeout(config.deadlines.create or None):
            image = await _image_here_or_elsewhere(request, options, spec, config, log, skipped)
    if skipped:
        publish(SKIPPED, events.ContainerUpdate(id=request.id, labels=skipped))
    if wants_library(spec, config) or (image is not None and _had_library(image)):
        if LIBRARY.exists():
            spec = edit_spec(bundle.path, add_library)
        else:
            log.warning("arena.disabled", task=request.id, error=f"{LIBRARY} was not built: `make native` builds it")
    if image is not None:
        from kybernate_shim.checkpoint.image.plaintext import require_key

        require_key(image, config)
    return Container(
        request.id,
        namespace=namespace,
        bundle=bundle,
        spec=spec,
        options=options,
        config=config,
        runtime=_runtime(bundle, spec, options, config, namespace, children),
        children=children,
        publish=publish,
        log=log,
        stdio=StdioConfig(request.stdin, request.stdout, request.stderr, request.terminal),
        image=image,
    )


async def _image_here_or_elsewhere(
    request: wire.CreateTaskRequest,
    options: RuntimeOptions,
    spec: Spec,
    config: Config,
    log: Log,
    skipped: dict[str, str],
) -> Image | None:
    """Do as `_image`; the node's agent brings an image that is not on the node. Raises as that, and ImageNotFetched."""
    from kybernate_shim.checkpoint.image.store import CheckpointNotFound

    try:
        return await asyncio.to_thread(_image, request, options, spec, config, log, skipped)
    except CheckpointNotFound:
        wanted = wanted_image(spec, config)
        if wanted is None or request.checkpoint or options.criu_image_path:
            raise
        from kybernate_shim.task.fetch import fetch  # few images are elsewhere

        if not await fetch(wanted, requester_of(spec), request.id):
            raise
    return await asyncio.to_thread(_image, request, options, spec, config, log, skipped)


def _had_library(image: Image) -> bool:
    """Return whether the image's processes have the preload library mapped, and so need its file to be there."""
    return any(mount.destination == DESTINATION for mount in image.manifest.mounts)


def _image(
    request: wire.CreateTaskRequest,
    options: RuntimeOptions,
    spec: Spec,
    config: Config,
    log: Log,
    skipped: dict[str, str],
) -> Image | None:
    """Return the checkpoint image to start from, None for a plain start; `skipped` gets why, where one was named.

    Raises CheckpointNotFound, CheckpointInvalid, ImageForbidden, ImageForeign, NotYours and KeyUnusable.
    """
    if path := request.checkpoint or options.criu_image_path:
        return _handed_over(Path(path), request, options, spec, config, log)
    requester = requester_of(spec)
    wanted = wanted_image(spec, config)
    if wanted is None:
        return None
    if wanted.by_environment and not may(requester, Right.ENVIRONMENT, config):
        log.warning(
            "restore.request_ignored", task=request.id, by=wanted.by, error="restore_from_env is false on this node"
        )
        return None
    from kybernate_shim.checkpoint.image.genuine import require_genuine  # most containers start from no image
    from kybernate_shim.checkpoint.image.locate import locate
    from kybernate_shim.checkpoint.image.store import read_for_restore

    image = read_for_restore(locate(wanted, requester, config))
    require_genuine(image, requester, config, log)
    source = image.manifest.source.name
    if not wanted.is_for(requester.container, source):
        log.warning("restore.skipped", task=request.id, image=wanted.name, container=requester.container, of=source)
        skipped.update(image=wanted.name, container=requester.container, of=source)
        return None
    return image


def _handed_over(
    path: Path, request: wire.CreateTaskRequest, options: RuntimeOptions, spec: Spec, config: Config, log: Log
) -> Image:
    """Return the image in a directory that containerd names.

    `request.checkpoint` is a directory that containerd has just unpacked from its content store, which takes nothing in
    whose SHA-256 is not its name; to digest it once more would only cost time. But what a tenant's reference
    names may come from any author: there the signature counts, and the digests that it covers. With `criu_image_path`
    it repeats that path, where any user may have written.
    """
    from kybernate_shim.checkpoint.image.genuine import require_genuine
    from kybernate_shim.checkpoint.image.store import read_image

    requester = requester_of(spec)
    image = read_image(path)
    require_genuine(image, requester, config, log, carried=True)
    content_store = bool(request.checkpoint) and not options.criu_image_path
    return replace(image, checked=content_store and not requester.is_tenant)


def _runtime(
    bundle: Bundle, spec: Spec, options: RuntimeOptions, config: Config, namespace: str, children: Children
) -> Runtime:
    binary = choose_runtime(os.environ, options, config, spec)
    cli = resolve_cli(binary, namespace=namespace, log=bundle.log, options=options, config=config, spec=spec)
    bundle.write_runtime(binary, options, root=cli.root.parent, systemd_cgroup=cli.systemd_cgroup)
    bundle.write_cleanup_record(CleanupRecord(str(binary), str(cli.root), cli.systemd_cgroup, phase="create"))
    return Runtime(cli, children, runtime_environment(os.environ, config.criu), config.deadlines, bundle.path)
