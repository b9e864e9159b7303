"""Checkpoint and restore of a container of the Task service: from requests to the steps in `checkpoint`, and back."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kybernate_shim.checkpoint.cleanup import work_name
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
from kybernate_shim.checkpoint.image.digests import DEFAULT, STRONG
from kybernate_shim.checkpoint.image.locate import namespace_root
from kybernate_shim.checkpoint.image.manifest import TcpPolicy
from kybernate_shim.checkpoint.image.starts import LATEST
from kybernate_shim.config import Config
from kybernate_shim.linux.private_files import copy_private
from kybernate_shim.messages import shim_pb2
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.options import decode_checkpoint_options
from kybernate_shim.oci.spec import Spec
from kybernate_shim.task.runs import DIRECTORY
from kybernate_shim.trust.requester import requester_of

TCP = "kybernate.io/tcp"
CRI_NAMESPACE = "k8s.io"
LONGEST_HOLD = 86400.0  # seconds
LONGEST_REASON = 100  # characters of what limits a freeze
WORKS_KEPT = 50  # whatever their age
WORK_SECONDS = 86400  # the others' maximum age; none that is in use is as old


def from_containerd(request: wire.CheckpointTaskRequest, *, spec: Spec, config: Config, work: Path) -> DumpRequest:
    """Return what a Checkpoint call of the Task service asks for.

    containerd copies `path` into its content store and removes it, so flushing is worthwhile only for an image path
    that the client has chosen. containerd saves the changes of the root filesystem itself. Raises Invalid.
    """
    options = decode_checkpoint_options(request.options if request.HasField("options") else None)
    leaves = not options.image_path  # every reader of containerd's content store can have it
    return DumpRequest(
        image=Path("/", options.image_path or request.path),  # containerd 1.7 passes on the first and uses another
        work=Path("/", options.work_path) if options.work_path else work,
        exit=options.exit,
        tcp="established" if options.open_tcp else tcp_policy(spec, config),
        rootfs_elsewhere=True,
        durable=bool(options.image_path),
        digest=STRONG if config.shared_key or (leaves and requester_of(spec).is_tenant) else DEFAULT,
        deadline=config.deadlines.checkpoint,
        options=options,
    )


def from_shim_service(request: shim_pb2.CheckpointRequest, *, spec: Spec, config: Config, work: Path) -> DumpRequest:
    """Return what a Checkpoint call of our own service asks for. Raises ValueError for what has no meaning."""
    place = place_of(request.path, spec, config)
    if requester_of(spec).is_tenant and place == config.checkpoint_root / requester_of(spec).namespace / LATEST:
        raise ValueError(f"{place}: {LATEST} is what pods call their newest image: give this one another name")
    tcp = request.tcp or tcp_policy(spec, config)
    if tcp not in ("close", "established"):
        raise ValueError(f"tcp: expected close or established, found {tcp!r}")
    if request.hold and (request.exit or tcp == "established"):
        other = "exit" if request.exit else "established connections, whose peers would learn of the end"
        raise ValueError(f"hold: cannot be combined with {other}")
    if not 0 <= request.hold_seconds <= LONGEST_HOLD:
        raise ValueError(f"hold_seconds: expected at most {LONGEST_HOLD:g}, found {request.hold_seconds:g}")
    if not request.max_freeze_seconds >= 0 or len(request.max_freeze_from) > LONGEST_REASON:
        raise ValueError("max_freeze_seconds: expected 0 or more, and at most 100 characters that say why")
    return DumpRequest(
        image=place,
        work=Path(request.work_path) if request.work_path else work,
        exit=request.exit,
        hold=(request.hold_seconds or config.deadlines.hold) if request.hold else 0,
        tcp="established" if tcp == "established" else "close",
        rootfs_diff=request.rootfs_diff,
        volumes=request.volumes,
        force=request.force,
        deadline=request.timeout_seconds or config.deadlines.checkpoint,
        source_image=request.image,
        source_digest=request.image_digest,
        digest=STRONG if config.shared_key else DEFAULT,
        max_freeze=request.max_freeze_seconds,
        max_freeze_from=request.max_freeze_from,
    )


def place_of(path: str, spec: Spec, config: Config) -> Path:
    """Return the directory of a new image: a relative name of a pod is in its namespace's directory."""
    requester = requester_of(spec)
    if requester.is_tenant and not path.startswith("/"):
        return namespace_root(config, requester.namespace) / path
    return config.checkpoint_root / path


def tcp_policy(spec: Spec, config: Config) -> TcpPolicy:
    """Return what the container's annotation says about its TCP connections."""
    return "established" if config.pods_choice(spec.annotations, TCP) == "established" else "close"


def work_directory(config: Config, namespace: str, container: str, verb: str) -> Path:
    """Return a directory for logs and scratch files that outlives the container, and remove the oldest of others'.

    The error of a pod names a log there, which people read after the pod is gone.
    """
    root = config.work_root
    oldest = time.time() - WORK_SECONDS
    for modified, path in sorted(_works(root))[:-WORKS_KEPT]:
        if modified < oldest:
            shutil.rmtree(path, ignore_errors=True)
    return root / work_name(namespace, container, verb)


def _works(root: Path) -> Iterator[tuple[float, str]]:
    """Yield when each operation's directory was changed, and its path; other daemons may remove them at any time."""
    with suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False) and entry.name != DIRECTORY:
                    yield entry.stat(follow_symlinks=False).st_mtime, entry.path


def share_with_cri(bundle: Path, namespace: str, container: str, work: Path) -> None:
    """Put CRIU's statistics where containerd's CRI wants them after a checkpoint.

    It names that directory as the work path only to runtimes of the type runc, and some releases then fail without the
    file. Its own root is above the bundle's work directory.
    """
    if namespace != CRI_NAMESPACE:
        return
    root = str((bundle / "work").resolve()).partition("/io.containerd.runtime.v2.task/")[0]
    directory = Path(root) / "io.containerd.grpc.v1.cri" / "containers" / container
    if not directory.is_dir():
        return
    for name in ("stats-dump", "dump.log"):
        if (work / name).exists() and not (directory / name).exists():
            copy_private(work / name, directory / name)


def response(dumped: Dumped, request: DumpRequest, seconds: float, frozen_ms: int) -> shim_pb2.CheckpointResponse:
    """Return the answer of our own service."""
    reply = shim_pb2.CheckpointResponse(
        path=str(request.image),
        manifest_digest=dumped.digest,
        bytes=dumped.manifest.bytes,
        frozen_ms=frozen_ms,
        seconds=seconds,
    )
    for step in dumped.manifest.steps:
        reply.steps.add(name=step.name, seconds=step.seconds, bytes=step.bytes, spared_bytes=step.spared)
    return reply
