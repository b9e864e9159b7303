"""A checkpoint image becomes a running container, in a bundle that may be a new pod's.

Everything that can be known is checked before CRIU starts; a failure names it. A restore that fails later leaves no
process, cgroup or runtime state behind, so that the caller can delete the container as one that never started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

from kybernate_shim.checkpoint import gate, names, script
from kybernate_shim.checkpoint.arriving import Awaited, awaited
from kybernate_shim.checkpoint.cleanup import Traces, plain_path, work_name
from kybernate_shim.checkpoint.compat import FORCE, RestorePlace, compare, read_host, require_compatible
from kybernate_shim.checkpoint.criu.claim import users_file
from kybernate_shim.checkpoint.criu.config import (
    EARLY_FILE_NAME,
    CriuOptions,
    explain,
    line,
    refuse_cuda_plugin,
    write_config,
)
from kybernate_shim.checkpoint.criu.confined import Inspection, inspecting
from kybernate_shim.checkpoint.criu.kept_ipc import remove_unused, without_kept
from kybernate_shim.checkpoint.criu.readdressed import pods_addresses, readdressed
from kybernate_shim.checkpoint.criu.user_namespace import joined_environment, moved_owners, readable_inside
from kybernate_shim.checkpoint.criu.versions import criu_of, runtime_of
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Image, listed
from kybernate_shim.checkpoint.image.verification import problems_of
from kybernate_shim.checkpoint.mounts.configured import SpecMounts
from kybernate_shim.checkpoint.mounts.matching import Matching, MountUnmatched, match_mounts
from kybernate_shim.checkpoint.mounts.mount_points import make_mount_points
from kybernate_shim.checkpoint.mounts.reachable import ReachableSources
from kybernate_shim.checkpoint.names import Names
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.privileges import PrivilegesExceeded, require_privileges
from kybernate_shim.checkpoint.rootfs.apply import Powers, apply_diff
from kybernate_shim.checkpoint.rootfs.diff import NAME as ROOTFS_DIFF
from kybernate_shim.checkpoint.settled import Settled
from kybernate_shim.checkpoint.target import Accelerator, NotBack, Target
from kybernate_shim.checkpoint.volumes.fill import PlacedVolume, fill, placed
from kybernate_shim.checkpoint.volumes.places import ANNOTATION as VOLUMES
from kybernate_shim.checkpoint.work import working_in
from kybernate_shim.errors import Failed, HeldFailed, Missing, Refused, Stopped
from kybernate_shim.linux.cgroup.cgroup import hierarchy_version
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.namespaces import hostname, set_hostname
from kybernate_shim.linux.private_files import close_files
from kybernate_shim.linux.threads import as_long_as_wanted, to_the_end
from kybernate_shim.logs import Log
from kybernate_shim.oci.commands import Criu
from kybernate_shim.oci.runtime import Runtime, RuntimeFailed
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.credentials import PrivilegeAllowance
from kybernate_shim.trust.requester import POD_IMAGE, requester_of
from kybernate_shim.trust.rights import Right, may
from kybernate_shim.undo import Undo, add

LOG = "restore.log"  # CRIU's, in the work directory
SHOWN = 6  # threads or sockets in a line of the log
JOINED = ("uts", "ipc")  # namespaces of the pod that CRIU would otherwise create again from the image


ADVICE = (
    (
        "has bad size",
        "the file is on a mount, a process had it open at the checkpoint, and its size has changed since: bring it back"
        " as it was",
    ),
    (
        "Can't find sysv shmem",
        "a process of another container of the pod is attached to a segment of shared memory (shmat) that the image"
        " has, too: restore this container first, or both in a new pod",
    ),
    (
        "Can't bind inet socket",
        "a socket of the image is bound to an address that this network does not have: restore it where the address is,"
        " or let the program listen on 0.0.0.0",
    ),
)
# All that CRIU logs where a process was killed meanwhile: it gets no notice of one that another process has forked.
WITHOUT_CAUSE = ("killed by signal 9", "Restoring FAILED", "cgroupd: recv req error")
BEFORE_THEY_RUN = (PrivilegesExceeded, HeldFailed)  # what ends processes that CRIU holds


class RestoreFailed(Failed):
    """The container could not be restored, and nothing of it is left. The message says why and where the log is."""


@dataclass(frozen=True)
class Prepared:
    """A restore whose outcome depends on CRIU alone.

    `inspection` is what its images say, `sources` what it mounts from outside, `replaced` which of its files CRIU reads
    with other content, `allowance` what its processes may have, None for all; `awaited` is what has to arrive before
    they run, and `settled` what must be put right.
    """

    criu: Criu
    environment: dict[str, str]
    inspection: Inspection
    settled: Settled
    sources: ReachableSources
    replaced: Mapping[str, bytes]
    allowance: PrivilegeAllowance | None = None
    awaited: Awaited | None = None


async def prepare(
    target: Target,
    image: Image,
    operation: Operation,
    log: Log,
    *,
    work: Path,
    accelerator: Accelerator | None = None,
    image_digest: str = "",
) -> Prepared:
    """Check image and place against each other, and bring the root filesystem into the image's state.

    `image_digest` is that of the new container's image, "" where it is unknown.
    Raises CheckpointInvalid, PrivilegesExceeded, Refused, Failed,
    Damaged or OSError; no process exists then.
    """
    with working_in(work, without=(LOG,)):
        return await _prepared(target, image, operation, log, work, accelerator, image_digest)


async def _prepared(
    target: Target,
    image: Image,
    operation: Operation,
    log: Log,
    work: Path,
    accelerator: Accelerator | None,
    image_digest: str,
) -> Prepared:
    optional = may(requester_of(target.spec), Right.SKIP_VERIFY, target.config)
    limited = not may(requester_of(target.spec), Right.EXCESS, target.config)
    async with inspecting(target.children, image.path, privileges=limited) as reading:
        if (target.config.verify or not optional) and not image.checked:
            total = image.manifest.bytes - sum(file.size for file in image.manifest.moved_files)
            with operation.step("verify", total_bytes=total):
                await _verify(image, operation)
        with operation.step("compare"):
            inspection = await reading
            allowance = require_privileges(
                target.spec, image.manifest.security, image.manifest.threads, inspection.privileges, log
            )
            matching = await _compare(target, image, inspection, log, accelerator, image_digest)
            fillings = placed(image.manifest.volumes, target.spec, _chosen_volumes(target), target.config.volumes_limit)
            settled = Settled.of(
                await to_the_end(partial(_names, image)),
                target.spec,
                target.bundle.rootfs,
                image.manifest.threads,
                matching.moved,
                image.manifest.sockets,
            )
            arrival = awaited(image, operation)
            replaced = await to_the_end(partial(_replaced, image, target.spec))
            prepared = _told(target, image, matching, inspection, work, allowance, arrival, settled, replaced)
    if any(file.name == ROOTFS_DIFF for file in image.manifest.files):
        with operation.step("rootfs") as step:
            step.bytes = await _apply(target, image)
    if fillings:
        with operation.step("volumes") as step:
            step.bytes = await _fill(target, image, fillings)
    await as_long_as_wanted(partial(make_mount_points, matching, target.bundle.rootfs))
    await as_long_as_wanted(partial(_make_names, prepared.settled.names, matching, target))
    return prepared


def _replaced(image: Image, spec: Spec) -> dict[str, bytes]:
    """Return CRIU's files with the new pod's addresses in them, and those without what the pod has already."""
    before = image.manifest.addresses
    moved = readdressed(image.path, before, pods_addresses(spec)) if before else {}
    return {**moved, **without_kept(image.path, spec)}


def _names(image: Image) -> Names:
    listed = any(file.name == names.FILE for file in image.manifest.files)
    return names.read(image.path) if listed else Names()


def _make_names(wanted: Names, matching: Matching, target: Target) -> None:
    mounts = SpecMounts.of(target.spec, target.bundle.rootfs, matching.moved)
    names.make_links(wanted, mounts, target.bundle.rootfs)
    names.make_directories(wanted, mounts, target.bundle.rootfs)


async def _apply(target: Target, image: Image) -> int:
    """Apply the diff of the root filesystem and return its bytes; a cancelled caller waits until no more is written."""
    (size,) = (file.size for file in image.manifest.files if file.name == ROOTFS_DIFF)
    stop = Event()
    apply = partial(
        apply_diff,
        image.path / ROOTFS_DIFF,
        target.bundle.rootfs,
        size=size,
        powers=Powers.of(target.spec),
        owners=moved_owners(image.path, target.spec),
        stopped=stop.is_set,
    )
    return (await as_long_as_wanted(apply, stop.set)).bytes


def _chosen_volumes(target: Target) -> str:
    return target.config.pods_choice(target.spec.annotations, VOLUMES)


async def _fill(target: Target, image: Image, fillings: Sequence[PlacedVolume]) -> int:
    """Fill the new pod's volumes and return the bytes; a cancelled caller waits until no more is written."""
    stop = Event()
    sizes = {file.name: file.size for file in image.manifest.files}
    owners = moved_owners(image.path, target.spec)
    work = partial(fill, fillings, image.path, sizes, target.spec, owners=owners, stopped=stop.is_set)
    return await as_long_as_wanted(work, stop.set)


async def _verify(image: Image, operation: Operation) -> None:
    stop = Event()

    def progress(done: int, total: int) -> None:
        if stop.is_set():
            raise Stopped
        operation.done_bytes, operation.total_bytes = done, total

    if problems := await to_the_end(partial(problems_of, image.path, image.manifest, progress, vram=False), stop.set):
        raise CheckpointInvalid(f"{image.path}: {listed(problems)}. Nothing was restored")


async def _compare(
    target: Target,
    image: Image,
    inspection: Inspection,
    log: Log,
    accelerator: Accelerator | None,
    image_digest: str,
) -> Matching:
    criu = await criu_of(target.children, target.config.criu)
    runtime = await runtime_of(target.children, target.runtime.cli.binary)
    name = target.spec.annotations.get(POD_IMAGE, "")
    place = RestorePlace(read_host(hierarchy_version()), criu.version, runtime.name, image_digest, name)
    matching, unmatched = Matching(), None
    try:
        work = partial(
            match_mounts,
            inspection.mounts,
            image.manifest.mounts,
            target.spec,
            target.bundle.rootfs,
            policy=target.config.hook_mounts,
            host=await asyncio.to_thread(read_mountinfo) if _has_hook_mounts(image.manifest) else (),
            strict=not may(requester_of(target.spec), Right.UNKNOWN_MOUNTS, target.config),
            root_writable=inspection.root_writable,
        )
        matching = await as_long_as_wanted(work)  # the sources of volumes may be of filesystems that do not answer
    except MountUnmatched as error:
        unmatched = error
    force = target.config.pods_choice(target.spec.annotations, FORCE) == "true"
    findings = compare(image.manifest, place, unmatched)
    if accelerator is not None:
        findings += await accelerator.compare(image.manifest)
    for risk in require_compatible(findings, force=force):
        log.warning("compatibility.overridden", fact=risk.fact, wanted=risk.wanted, found=risk.found)
    return matching


def _has_hook_mounts(manifest: Manifest) -> bool:
    return any(mount.kind == "hook" for mount in manifest.mounts)


def _told(
    target: Target,
    image: Image,
    matching: Matching,
    inspection: Inspection,
    work: Path,
    allowance: PrivilegeAllowance | None,
    awaited: Awaited | None,
    settled: Settled,
    replaced: Mapping[str, bytes],
) -> Prepared:
    manifest = image.manifest
    sources = ReachableSources.of(target.spec, work, matching.sources)
    options = CriuOptions(
        tcp=manifest.tcp,
        network_lock=manifest.tcp == "established",
        shell_job=manifest.terminal,
        ext_unix_sk="ext-unix-sk" in manifest.criu.options,
        libdir=target.config.criu_libdir,
        extra=(*(sources.lines or matching.lines), *_joined_namespaces(target.spec), *_cgroup_root(target.spec)),
    )
    configuration = write_config(
        target.bundle.path, options, [users_file(target.spec, target.config, target.runtime.cli.binary.name)]
    )
    if manifest.has_gpu_state:
        refuse_cuda_plugin(configuration)
    if gate.must_hold(allowance, awaited, settled):
        script.arm(configuration)
    words = Criu(
        image.path,
        work,
        tcp_established=manifest.tcp == "established",
        shell_job=manifest.terminal,
        file_locks=True,
    )
    environment = {**configuration.environment, **joined_environment(target.spec)}
    return Prepared(words, environment, inspection, settled, sources, replaced, allowance, awaited)


def _joined_namespaces(spec: Spec) -> list[str]:
    """Return CRIU's lines to put the processes into the pod's own namespaces: its hostname is theirs then."""
    return [line("join-ns", f"{kind}:{path}") for kind in JOINED if (path := spec.namespace_path(kind))]


def _cgroup_root(spec: Spec) -> list[str]:
    """Return CRIU's line that puts the processes into the new container's cgroup where cgroup v2 is all there is.

    There runc names none to CRIU, which would create the dumped container's cgroup again: out of reach for the new
    container's limits, statistics and signals.
    """
    if hierarchy_version() != 2 or not spec.cgroups_path:
        return []
    return [line("cgroup-root", f":/{plain_path(spec.cgroups_path)}")]


async def run(
    target: Target, prepared: Prepared, operation: Operation, log: Log, *, fds: Mapping[int, int], console: Path | None
) -> None:
    """Let CRIU restore the processes; they run when this returns, and init's pid is in the bundle.

    Raises RestoreFailed, and PrivilegesExceeded before an instruction of theirs; nothing of the container is left then.
    """
    seconds = target.runtime.deadlines.restore
    image, work = prepared.criu.image_path, prepared.criu.work_path
    with (
        operation.step("restore") as step,
        _kept_hostname(target.spec),
        prepared.sources.made(),
        readable_inside(image, target.spec, work, prepared.replaced) as readable,
    ):
        prepared = replace(prepared, criu=replace(prepared.criu, image_path=readable))
        await to_the_end(partial(remove_unused, image, target.spec))
        held_back = gate.held_back(target.spec, prepared.allowance, prepared.awaited, prepared.settled)
        async with held_back as held:
            runtime = replace(target.runtime, env={**target.runtime.env, **prepared.environment})
            try:
                if held is None:
                    await _criu(target, runtime, prepared, fds, console)
                else:
                    await held.guarded(_criu(target, held.known_to(runtime), prepared, fds, console), seconds)
                    held.require_passed()
            except BEFORE_THEY_RUN as error:
                await _remove_after(error, target)
                raise
            except RuntimeFailed as error:
                left = await remove_remains(target)
                if held is not None and held.refusals:
                    held.require_passed()
                if held is not None and held.failure is not None:
                    raise RestoreFailed(f"{_failed(target, left)}: {held.failure}") from held.failure
                text = explain(f"{_failed(target, left)}: {error.message}", prepared.criu.work_path / LOG)
                raise RestoreFailed(_advised(text)) from error
    if different := prepared.settled.differences:
        log.warning("restore.threads_changed", task=target.id, threads=different[:SHOWN])
    if different := prepared.settled.of_sockets:
        log.warning("restore.sockets_changed", task=target.id, sockets=different[:SHOWN])
    if prepared.awaited is not None:
        step.seconds -= prepared.awaited.step.seconds


async def _criu(
    target: Target, runtime: Runtime, prepared: Prepared, fds: Mapping[int, int], console: Path | None
) -> None:
    try:
        await runtime.restore(
            target.id, target.bundle, prepared.criu, fds=fds, console_socket=console, options=target.options
        )
    finally:
        close_files(prepared.criu.work_path)


def _advised(message: str) -> str:
    """Add what to do about failures whose words in CRIU's log do not say it."""
    found = [advice for sign, advice in ADVICE if sign in message]
    errors = [part for part in message.split("; ") if "Error (" in part]
    if errors and all(any(sign in error for sign in WITHOUT_CAUSE) for error in errors):
        found.append(
            "a process was killed while it was being restored, as the kernel does where a memory limit does not suffice"
            ", which a restore may exceed for a moment: give the container a larger limit; the image stays as it is"
        )
    return "; ".join([message, *found])


def _failed(target: Target, left: str) -> str:
    return f"restore of container {target.id} failed, {left or 'nothing is left of it'}"


@contextmanager
def _kept_hostname(spec: Spec) -> Iterator[None]:
    """Give the pod's UTS namespace its name back: CRIU writes the dumped one into the namespace that it joins."""
    path = spec.namespace_path("uts")
    if not path:
        yield
        return
    with Undo() as undo:
        undo.callback(set_hostname, Path(path), hostname(Path(path)))
        yield


@asynccontextmanager
async def complete_or_gone(target: Target) -> AsyncIterator[None]:
    """Enclose `run` and what makes a container of the restored processes: if it fails, nothing of them is left.

    A NotBack becomes a RestoreFailed.
    """
    try:
        yield
    except (RestoreFailed, *BEFORE_THEY_RUN):
        raise  # by `run`, which has removed it
    except BaseException as error:
        if not isinstance(error, NotBack):
            await _remove_after(error, target)
            raise
        left = await remove_remains(target)
        raise RestoreFailed(f"{_failed(target, left)}: {error}") from error


async def _remove_after(error: BaseException, target: Target) -> None:
    if left := await remove_remains(target):
        add(error, left)


async def remove_remains(target: Target) -> str:
    """Remove what a failed restore has begun: processes, mounts, cgroups, the runtime's state. Say what stays, if any.

    Its cgroup is leased: all that is in there is its own.
    """
    traces = Traces(
        configuration=target.bundle.path / EARLY_FILE_NAME,
        cgroups_path=target.spec.cgroups_path,
        state=target.runtime.cli.root / target.id,
        work=work_name(target.namespace, target.id),
    )
    try:
        await asyncio.to_thread(traces.clear_restore)
        await target.runtime.delete(target.id, force=True)
    except Missing:
        pass  # it did not get so far that the runtime knows it
    except (RuntimeFailed, Failed, Refused, OSError) as error:
        return f"and not all of it could be removed ({error})"
    return ""
