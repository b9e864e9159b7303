"""Which checkpoint image a new container starts from: the one handed over, or the one that it requests itself, if any.

Loaded with the first container that asks for one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from kybernate_shim.checkpoint.image.genuine import require_genuine
from kybernate_shim.checkpoint.image.locate import locate
from kybernate_shim.checkpoint.image.namespace import images_of, origin_of
from kybernate_shim.checkpoint.image.requested import Wanted
from kybernate_shim.checkpoint.image.starts import (
    LATEST,
    MOST_SHORT_RUNS,
    ON_RESTART,
    SOON,
    KnownImage,
    Run,
    Start,
    asked,
    is_given_up,
    on_restart,
    start_of,
)
from kybernate_shim.checkpoint.image.store import CheckpointNotFound, Image, read_for_restore, read_image
from kybernate_shim.config import Config
from kybernate_shim.logs import Log
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.spec import Spec
from kybernate_shim.task.fetch import ImageNotFetched, fetch, related
from kybernate_shim.task.runs import PodRuns
from kybernate_shim.trust.requester import Requester, requester_of
from kybernate_shim.trust.rights import Right, may


async def image_for(
    request: wire.CreateTaskRequest,
    options: RuntimeOptions,
    wanted: Wanted | None,
    spec: Spec,
    config: Config,
    runs: PodRuns | None,
    log: Log,
    skipped: dict[str, str],
) -> Image | None:
    """Return the image to start from, None for a plain start. `wanted` is what the container itself requests.

    `skipped` gets the image that was left out, and its container, where the named image is that of another container.

    Not on the event loop: a disk may not answer, and the pod's other containers must be served meanwhile. Raises
    CheckpointNotFound, CheckpointInvalid, Refused and
    ImageNotFetched.
    """
    if path := request.checkpoint or options.criu_image_path:
        return await asyncio.to_thread(_handed_over, Path(path), request, options, spec, config, log)
    if wanted is None:
        return None
    return await _here_or_elsewhere(request, wanted, spec, config, runs, log, skipped)


async def _here_or_elsewhere(
    request: wire.CreateTaskRequest,
    wanted: Wanted,
    spec: Spec,
    config: Config,
    runs: PodRuns | None,
    log: Log,
    skipped: dict[str, str],
) -> Image | None:
    """Return the image that a container asks for, None for a fresh start; the agent fetches one from elsewhere."""
    requester = requester_of(spec)
    if wanted.by_environment and not may(requester, Right.ENVIRONMENT, config):
        log.warning(
            "restore.request_ignored", task=request.id, by=wanted.by, error="restore_from_env is false on this node"
        )
        return None
    ended = await asyncio.to_thread(runs.read) if runs is not None else ()
    start = await _start(wanted, requester, spec, config, ended, log)
    if not start.name:
        log.info("restore.omitted", task=request.id, reason=start.why)
        return None
    wanted = replace(wanted, name=start.name)
    try:
        image = await asyncio.to_thread(_named, request, wanted, requester, config, log, skipped)
    except CheckpointNotFound as error:
        if await fetch(wanted, requester, request.id):
            image = await asyncio.to_thread(_named, request, wanted, requester, config, log, skipped)
        elif start.optional:
            log.warning("restore.omitted", task=request.id, reason=f"it starts again, and no image is left: {error}")
            return None
        else:
            raise
    if image is not None and is_given_up(image.manifest.id, start, ended):
        reason = f"{MOST_SHORT_RUNS} times it has ended within {SOON:g} s of its restore from {wanted.name}"
        log.warning("restore.omitted", task=request.id, reason=reason)
        return None
    return image


async def _start(
    wanted: Wanted, requester: Requester, spec: Spec, config: Config, ended: tuple[Run, ...], log: Log
) -> Start:
    """Return what a container starts from; outside a pod, it is what is named.

    Images that only other nodes or the object store have are known by the agent. Raises Refused, and
    ImageNotFetched where it does not answer and the newest image is asked for.
    """
    if not requester.sandbox:
        return Start(wanted.name, f"{wanted.by} names it")
    restart = on_restart(config.pods_choice(spec.annotations, ON_RESTART))
    base, at, _ = asked(wanted.name)
    elsewhere: tuple[KnownImage, ...] = ()
    marks = [requester.uid]
    if at:
        marks.append(await asyncio.to_thread(origin_of, requester.namespace, base, config))
        elsewhere = await related(requester, base, marks)
        marks += [image.origin for image in elsewhere if image.name == base]
    elif base == LATEST:
        marks.append(requester.pod)
        elsewhere = await related(requester, "", marks)
    here = await asyncio.to_thread(images_of, requester.namespace, marks, config)
    if not at and base != LATEST and (here or ended):
        try:
            elsewhere = await related(requester, "", marks)
        except ImageNotFetched as error:
            log.warning("restore.others_omitted", error=str(error))
    ids = {image.id for image in here}
    others = {image.name: image for image in elsewhere if image.id not in ids}
    known = others | {image.name: image for image in here}
    return start_of(wanted, restart, requester, tuple(known.values()), ended)


def _named(
    request: wire.CreateTaskRequest,
    wanted: Wanted,
    requester: Requester,
    config: Config,
    log: Log,
    skipped: dict[str, str],
) -> Image | None:
    """Return the image of that name, None where it is that of another container of the pod.

    Raises CheckpointNotFound, CheckpointInvalid and Refused.
    """
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

    `request.checkpoint` is a directory that containerd has just unpacked from its content store, which rejects content
    whose SHA-256 is not its name; computing it again would only cost time. But what a tenant's reference names may come
    from any author: there the signature counts, and the digests that it covers. With `criu_image_path` it repeats that
    path, where any user may have written.
    """
    requester = requester_of(spec)
    image = read_image(path)
    require_genuine(image, requester, config, log, carried=True)
    content_store = bool(request.checkpoint) and not options.criu_image_path
    return replace(image, checked=content_store and not requester.is_tenant)
