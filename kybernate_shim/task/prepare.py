"""From a Create request to a container object: everything is read and decided here, and nothing is started yet."""

from __future__ import annotations

import asyncio
import os
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
from kybernate_shim.oci.annotations import RESTORE_FROM, has_seat, require_unmistaken
from kybernate_shim.oci.bundle import Bundle, CleanupRecord
from kybernate_shim.oci.gpu_spec import set_environment
from kybernate_shim.oci.options import RuntimeOptions, decode_options, effective_config
from kybernate_shim.oci.preload_spec import (
    DESTINATION,
    LEDGER,
    LIBRARY,
    TURN,
    add_library,
    declared_vram,
    limit_vram,
    make_turn_file,
    show_turn,
    wants_library,
)
from kybernate_shim.oci.runtime import Runtime, runtime_environment
from kybernate_shim.oci.select import choose_runtime, resolve_cli
from kybernate_shim.oci.spec import Spec, edit_spec
from kybernate_shim.run_directory import turn_file
from kybernate_shim.task.container import Container, Publish
from kybernate_shim.task.stdio import StdioConfig
from kybernate_shim.trust.requester import CONTAINER_TYPE

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.image.store import Image


SKIPPED = "/kybernate/shim/skipped"  # topic of the event about a container for which a named image is not meant


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

    `config` is the node's; the container's own options are laid over it. Raises Invalid, ConfigInvalid,
    Refused, Missing, what `image_for` raises, TimeoutError where the image cannot be read in time, and OSError when
    the bundle's disk is full.
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
    image, runs, wanted = None, None, wanted_image(spec, config)
    if request.checkpoint or options.criu_image_path or wanted is not None:
        from kybernate_shim.task.chosen_image import image_for  # most containers start from none
        from kybernate_shim.task.runs import PodRuns

        runs = PodRuns.of(spec, config.work_root) if wanted is not None else None
        skipped: dict[str, str] = {}
        async with asyncio.timeout(config.deadlines.create or None):
            image = await image_for(request, options, wanted, spec, config, runs, log, skipped)
        if skipped:
            publish(SKIPPED, events.ContainerUpdate(id=request.id, labels=skipped))
    # Processes of an image that was made without the library do not have it, and its mount would be a difference.
    library = wants_library(spec, config) and (image is None or declared_vram(spec, config) > 0)
    if library or (image is not None and _has_mount(image, DESTINATION)):
        if LIBRARY.exists():
            spec = edit_spec(bundle.path, add_library)
            limit = declared_vram(spec, config)
            if limit or (image is not None and _has_mount(image, LEDGER)):
                spec = edit_spec(bundle.path, partial(limit_vram, limit=limit))
            if has_seat(spec.annotations) if image is None else _has_mount(image, TURN):
                file = make_turn_file(turn_file(namespace, request.id))
                spec = edit_spec(bundle.path, partial(show_turn, file=file))
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
        runs=runs,
    )


def _has_mount(image: Image, destination: str) -> bool:
    """Return whether the image's processes have a file of ours mapped, which must exist again."""
    return any(mount.destination == destination for mount in image.manifest.mounts)


def _runtime(
    bundle: Bundle, spec: Spec, options: RuntimeOptions, config: Config, namespace: str, children: Children
) -> Runtime:
    binary = choose_runtime(os.environ, options, config, spec)
    cli = resolve_cli(binary, namespace=namespace, log=bundle.log, options=options, config=config, spec=spec)
    bundle.write_runtime(binary, options, root=cli.root.parent, systemd_cgroup=cli.systemd_cgroup)
    bundle.write_cleanup_record(CleanupRecord(str(binary), str(cli.root), cli.systemd_cgroup, phase="create"))
    return Runtime(cli, children, runtime_environment(os.environ, config.criu), config.deadlines, bundle.path)
