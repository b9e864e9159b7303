"""What a dump finds out before anything is changed: key, versions, sockets, mounts, room, and CRIU's options."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

from kybernate_shim.checkpoint import bound_sockets, own_state, sockets, undumpable
from kybernate_shim.checkpoint.compat import read_host
from kybernate_shim.checkpoint.criu.claim import users_file
from kybernate_shim.checkpoint.criu.config import Configuration, CriuOptions, write_config
from kybernate_shim.checkpoint.criu.readdressed import pods_addresses
from kybernate_shim.checkpoint.criu.user_namespace import joined_environment
from kybernate_shim.checkpoint.criu.versions import criu_of, runtime_of
from kybernate_shim.checkpoint.dump_request import DumpRequest
from kybernate_shim.checkpoint.freeze_limit import FreezeLimit, limit_of
from kybernate_shim.checkpoint.image.manifest import Lineage, Manifest, Source, now
from kybernate_shim.checkpoint.image.plaintext import require_room
from kybernate_shim.checkpoint.mounts.configured import SpecMounts
from kybernate_shim.checkpoint.mounts.described import describe_mounts
from kybernate_shim.checkpoint.mounts.hooks import HookMount, dump_lines, hook_mounts
from kybernate_shim.checkpoint.target import Target
from kybernate_shim.checkpoint.volumes.save import ChosenVolumes, wanted
from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.process import tree_below
from kybernate_shim.linux.threads import as_long_as_wanted
from kybernate_shim.logs import Log
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.keys import Key, signing_key
from kybernate_shim.trust.requester import POD_IMAGE, requester_of

HELD = re.compile(r"^Vm(?:RSS|Swap):\s*(\d+) kB$", re.MULTILINE)  # source: proc(5), /proc/pid/status


async def require_directories(target: Target, request: DumpRequest, log: Log | None = None) -> None:
    """Refuse UNIX sockets that a restore could not bind; where they are allowed, write to the `log`.

    The result is certain only while the processes are frozen. Raises Refused.
    """
    lenient = request.rootfs_elsewhere or request.force
    if request.rootfs_diff or (lenient and log is None):
        return

    def look() -> list[bound_sockets.Unbindable]:
        assert target.cgroup is not None
        found = sockets.container_sockets(target.cgroup.processes())
        return bound_sockets.without_directory(found, target.init_pid, target.bundle.rootfs)

    unbindable = await as_long_as_wanted(look)
    if unbindable and not lenient:
        raise bound_sockets.socket_directory_not_saved(target.id, unbindable)
    if unbindable and log is not None:
        log.warning("socket.directory_not_saved", task=target.id, error=bound_sockets.described(unbindable))


async def require_common_state(target: Target, request: DumpRequest, log: Log | None = None) -> None:
    """Refuse processes and threads with what CRIU cannot restore; where that is allowed, write to the `log`.

    The result is certain only while the processes are frozen. Raises Refused.
    """
    assert target.cgroup is not None
    pids = await asyncio.to_thread(target.cgroup.processes)
    if nested := await as_long_as_wanted(lambda: own_state.nested_namespaces(pids, target.init_pid)):
        raise own_state.namespace_nested(target.id, nested)
    if request.force and log is None:
        return
    found = await as_long_as_wanted(lambda: own_state.own_thread_state(pids))
    if found and not request.force:
        raise own_state.thread_state_not_saved(target.id, found)
    if found and log is not None:
        log.warning("thread.state_not_saved", task=target.id, error=own_state.listed(found))


@dataclass(frozen=True)
class DumpPlan:
    """What was found out before anything was changed."""

    pids: Sequence[int]
    hooks: Sequence[HookMount]
    configuration: Configuration
    manifest: Manifest
    key: Key
    spec: Spec
    volumes: ChosenVolumes
    limit: FreezeLimit


async def plan_dump(target: Target, request: DumpRequest, log: Log) -> DumpPlan:
    """Find out whether and how `target` can be dumped. Raises what refuses it, with nothing changed."""
    assert target.cgroup is not None
    limit = limit_of(request.max_freeze, request.max_freeze_from, target.spec, target.config)
    key = await asyncio.to_thread(signing_key, target.config)
    criu = await criu_of(target.children, target.config.criu)
    runtime = await runtime_of(target.children, target.runtime.cli.binary)
    pids = await asyncio.to_thread(target.cgroup.processes)
    await as_long_as_wanted(partial(undumpable.require_few_descriptors, target.id, pids))
    found = await as_long_as_wanted(partial(sockets.container_sockets, pids))
    unnamed = await as_long_as_wanted(partial(sockets.of_other_users, found))
    addresses = await as_long_as_wanted(partial(pods_addresses, target.spec)) if request.tcp == "close" else ()
    for line in sockets.what_happens(found, request.tcp, unnamed, addresses):
        log.info("socket.examined", outcome=line)
    # CRIU dumps init's descendants. A program that was executed in the container, such as a probe, is the shim's child,
    # and may have files of the node's open: with `--log-uri file:///dev/null` its input is the node's /dev/null.
    dumped = await as_long_as_wanted(partial(tree_below, target.init_pid, pids))
    held = await as_long_as_wanted(partial(undumpable.look, dumped))
    if held.problems:
        raise undumpable.not_dumpable(target.id, held)
    joined_environment(target.spec)
    await require_directories(target, request, log)
    await require_common_state(target, request, log)
    hooks = await as_long_as_wanted(
        lambda: hook_mounts(target.spec, target.bundle.rootfs, read_mountinfo(str(target.init_pid)), read_mountinfo())
    )
    stop = Event()
    find_volumes = partial(wanted, target.spec, target.config, chosen=request.volumes, stopped=stop.is_set)
    volumes = await as_long_as_wanted(find_volumes, stop.set)
    require_room(request, memory_bytes(target) + volumes.bytes)
    options = CriuOptions(
        tcp=request.tcp,
        network_lock=sockets.needs_network_lock(found, request.tcp),
        shell_job=request.options.terminal or target.spec.terminal,
        ext_unix_sk=request.options.external_unix_sockets or bool(sockets.external_unix(found)),
        libdir=target.config.criu_libdir,
        extra=(*dump_lines(hooks, SpecMounts.of(target.spec, target.bundle.rootfs)), *held.lines),
    )
    configuration = write_config(target.bundle.path, options, [users_file(target.spec, target.config, runtime.name)])
    manifest = Manifest(
        id=Path("/proc/sys/kernel/random/uuid").read_text().strip(),
        time=now(),
        source=_source(target, request),
        lineage=_lineage(target),
        runtime=runtime,
        criu=replace(criu, options=configuration.lines),
        host=read_host(target.cgroup.version),
        tcp=request.tcp,
        terminal=target.spec.terminal,
        rootfs_diff=request.rootfs_diff,
        mounts=describe_mounts(target.spec, target.bundle.rootfs, hooks),
        addresses=addresses,
    )
    return DumpPlan(pids, hooks, configuration, manifest, key, target.spec, volumes, limit)


def _source(target: Target, request: DumpRequest) -> Source:
    pod, notes = requester_of(target.spec), target.spec.annotations
    return Source(
        container=target.id,
        namespace=pod.namespace,
        pod=pod.pod,
        name=pod.container,
        image=request.source_image or notes.get(POD_IMAGE, ""),
        image_digest=request.source_digest,
        node=os.uname().nodename,
    )


def _lineage(target: Target) -> Lineage:
    return Lineage(
        origin=target.came_from.origin if target.came_from is not None else "",
        parent=target.came_from.id if target.came_from is not None else "",
        pod_uid=requester_of(target.spec).uid,
    )


def memory_bytes(target: Target) -> int:
    """Return about how much memory the processes hold, which is about what CRIU writes."""
    total = 0
    for pid in target.cgroup.processes() if target.cgroup is not None else ():
        try:
            status = text_of(f"/proc/{pid}/status")
        except OSError:
            continue
        total += sum(int(size) << 10 for size in HELD.findall(status))
    return total
