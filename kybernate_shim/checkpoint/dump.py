"""A running container becomes a checkpoint image.

Each step's reversal goes onto one stack, and the stack is unwound in every case: after a failure, so that the container
goes on as if nothing had been, and after a success that leaves it running, for the same reason. It stands still no
longer than its state is being read: flushing the image to the disk often takes longer than that. Only when it is to be
gone afterwards does it stay frozen until the image is complete, and is then killed: CRIU could kill it itself, but then
a full disk in the last step would lose the container.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint import criu_credentials, criu_images, mounts, sockets
from kybernate_shim.checkpoint.claim import users_file, without_claim
from kybernate_shim.checkpoint.compat import read_host
from kybernate_shim.checkpoint.criu import (
    Configuration,
    CriuOptions,
    explain,
    refuse_cuda_plugin,
    write_config,
)
from kybernate_shim.checkpoint.digests import DEFAULT as DEFAULT_DIGEST
from kybernate_shim.checkpoint.digests import Digester
from kybernate_shim.checkpoint.draft import draft
from kybernate_shim.checkpoint.image import payload_names, write_manifest
from kybernate_shim.checkpoint.manifest import (
    ArenaFile,
    DataPath,
    File,
    Manifest,
    Process,
    Source,
    StdioKind,
    TcpPolicy,
    VramFile,
    now,
)
from kybernate_shim.checkpoint.mounts import HookMount
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.plaintext import encrypted, require_room, staged_for_dump
from kybernate_shim.checkpoint.rootfs import find_overlay
from kybernate_shim.checkpoint.rootfs_diff import NAME as ROOTFS_DIFF
from kybernate_shim.checkpoint.rootfs_diff import write_diff
from kybernate_shim.checkpoint.signature import sign
from kybernate_shim.checkpoint.standstill import stand_still
from kybernate_shim.checkpoint.target import Accelerator, Detached, NotBack, Target
from kybernate_shim.checkpoint.versions import criu_of, runtime_of
from kybernate_shim.cuda.vram.errors import VramError
from kybernate_shim.errors import Failed
from kybernate_shim.linux.cgroups import FreezeTimedOut
from kybernate_shim.linux.mountinfo import read_mountinfo
from kybernate_shim.linux.plain_files import read_plain
from kybernate_shim.linux.private import copy_private, write_private
from kybernate_shim.linux.threads import to_the_end
from kybernate_shim.logs import Log
from kybernate_shim.oci.commands import Criu
from kybernate_shim.oci.options import CheckpointOptions
from kybernate_shim.oci.runtime import RuntimeFailed
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.credentials import security_of
from kybernate_shim.trust.keys import Key, signing_key
from kybernate_shim.trust.places import make_private
from kybernate_shim.trust.requester import requester_of
from kybernate_shim.undo import AsyncUndo

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.encrypted import Sealed  # few nodes encrypt

LOG = "dump.log"  # CRIU's, in the work directory
STATISTICS = "stats-dump"
ADVICE = (
    # Its pull request 2719: SO_PASSCRED, which Linux 6.16 took away from all but a few families of sockets.
    ("Can't get 1:16 opt", "CRIU before 4.2 cannot dump network sockets on Linux 6.16 and later: install a newer one"),
)
MOST_DESCRIPTORS = 1 << 20  # bytes of descriptors.json
SPEC = "kybernate-spec.json"  # config.json as containerd wrote it: what a restore without a pod starts from
POD_IMAGE = "io.kubernetes.cri.image-name"


class DumpFailed(Failed):
    """No image was made; the container goes on as before. The message has what CRIU said and where its log is."""


@dataclass(frozen=True)
class DumpRequest:
    """What a client wants. `image` is the directory for the image, `work` the one for logs and CRIU's scratch files.

    `durable`: the image survives a power failure once the call returns; a directory that containerd copies and removes
    at once need not. `deadline` is in seconds for all steps together, 0 for none. `digest` is the algorithm for files.
    With a `destination`, `image` is a directory in memory, and the files go to the destination encrypted.
    """

    image: Path
    work: Path
    exit: bool = False
    tcp: TcpPolicy = "close"
    rootfs_diff: bool = False
    durable: bool = True
    force: bool = False
    deadline: float = 0
    options: CheckpointOptions = field(default_factory=CheckpointOptions)
    source_image: str = ""
    source_digest: str = ""
    digest: str = DEFAULT_DIGEST
    destination: Path | None = None


@dataclass(frozen=True)
class Dumped:
    """A finished image. `digest` is the manifest's."""

    manifest: Manifest
    digest: str


async def dump(
    target: Target, request: DumpRequest, operation: Operation, log: Log, accelerator: Accelerator | None = None
) -> Dumped:
    """Write the checkpoint image of `target` and leave it as it was, frozen if it came frozen.

    Raises DumpFailed, CriuUnusable, TierFull, CheckpointInvalid, TimeoutError or what the accelerator refuses; there is
    no image then, and the container goes on. Raises NotBack where its GPU state could not be brought back; an image
    whose data was complete by then is finished and kept, since it is the best copy of the container.
    """
    lost: NotBack | None = None

    def lose(error: NotBack) -> None:
        nonlocal lost
        lost = error

    try:
        with draft(request.image):
            _prepare_work(request.work)
            async with staged_for_dump(target, request) as staged, asyncio.timeout(request.deadline or None):
                dumped = await _steps(target, staged, operation, log, accelerator, lose)
    except RuntimeFailed as error:
        raise DumpFailed(_advised(explain(f"{_failed(target)}: {error.message}", request.work / LOG))) from error
    except TimeoutError as error:
        why = str(error) or f"it had not ended after {request.deadline:g} s"  # the deadline itself comes without words
        raise TimeoutError(f"{_failed(target)}: {why}") from error
    except (OSError, VramError, FreezeTimedOut) as error:
        raise DumpFailed(f"{_failed(target)}: {error}") from error
    if lost is not None:
        raise lost
    return dumped


def _failed(target: Target) -> str:
    """Say what failed, and what became of the container."""
    alive = target.cgroup is not None and target.cgroup.processes()
    return f"checkpoint of container {target.id} failed, it {'goes on as before' if alive else 'has ended'}"


def _advised(message: str) -> str:
    """Add what to do about failures whose words in CRIU's log do not say it."""
    return "; ".join([message, *(advice for sign, advice in ADVICE if sign in message)])


def _prepare_work(work: Path) -> None:
    """Make the directory for CRIU's files; what an earlier dump has left there must not be taken for this one's."""
    make_private(work)
    for name in (LOG, STATISTICS):
        (work / name).unlink(missing_ok=True)


async def _steps(
    target: Target,
    request: DumpRequest,
    operation: Operation,
    log: Log,
    accelerator: Accelerator | None,
    lose: Callable[[NotBack], None],
) -> Dumped:
    assert target.cgroup is not None
    cgroup = target.cgroup
    was_frozen = cgroup.frozen
    with operation.step("look"):
        look = await _look(target, request, log)
        if accelerator is not None:
            refuse_cuda_plugin(look.configuration)
    killed = False

    async def set_frozen(frozen: bool) -> None:
        if not killed:  # freezing again what is about to die would wait for it, or keep it from dying
            await _set_frozen(target, frozen)

    async with AsyncUndo() as back:
        back.push_async_callback(set_frozen, was_frozen)
        detached: Detached | None = None
        if accelerator is not None:
            if was_frozen:
                await to_the_end(cgroup.thaw)
            leaving = accelerator.detached(
                operation, request.image, force=request.force, strong=request.digest != DEFAULT_DIGEST
            )
            detached = await back.enter_async_context(leaving)
            # Their memory has grown by what was in VRAM, but for what is in the image already.
            require_room(request, _memory_bytes(target) - detached.driven_bytes + detached.arena_bytes)
            await back.enter_async_context(detached.moved_out(request.image, operation))
            back.push_async_callback(set_frozen, False)
        begin = await _stand_still(target, operation, detached)
        with Digester(request.digest) as digester:
            await _run_criu(target, request, operation, look, digester)
            if request.rootfs_diff:
                with operation.step("rootfs") as step:
                    step.bytes = await to_the_end(partial(_write_rootfs_diff, target, request.image))
            if detached is not None:
                await detached.complete()
            if not request.exit:
                try:
                    await back.aclose()
                except NotBack as error:
                    lose(error)
                operation.frozen_ms = _since(begin)
            await to_the_end(partial(_add_own_files, target, request))
            sealed = await encrypted(request, look.manifest.id, target.config, operation)
            with operation.step("manifest"):
                dumped = await to_the_end(partial(_finish, request, operation, look, detached, digester, sealed))
        if request.exit:
            operation.frozen_ms = _since(begin)
            if not _criu_kills(request):
                await to_the_end(cgroup.kill)  # while it is frozen: nothing may happen after the image
            killed = True
            if detached is not None:
                detached.gone = True
        return dumped


async def _stand_still(target: Target, operation: Operation, detached: Detached | None) -> float:
    """Freeze a container that CRIU can dump, and return when that began.

    Forked processes that appear before everything is frozen may have inherited what CRIU refuses.
    """
    assert target.cgroup is not None
    while True:
        if detached is not None:
            await detached.release(operation)
        begin = time.monotonic()
        with operation.step("freeze"):
            await to_the_end(partial(stand_still, target.cgroup))
        if detached is None or not await detached.must_release():
            return begin
        await to_the_end(target.cgroup.thaw)


def _since(begin: float) -> int:
    """Return the milliseconds since a moment of the monotonic clock."""
    return round((time.monotonic() - begin) * 1000)


@dataclass(frozen=True)
class _Look:
    """What was found out before anything was changed."""

    pids: Sequence[int]
    hooks: Sequence[HookMount]
    configuration: Configuration
    manifest: Manifest
    key: Key
    spec: Spec


async def _look(target: Target, request: DumpRequest, log: Log) -> _Look:
    assert target.cgroup is not None
    key = await asyncio.to_thread(signing_key, target.config)
    criu = await criu_of(target.children, target.config.criu)
    runtime = await runtime_of(target.children, target.runtime.cli.binary)
    pids = await asyncio.to_thread(target.cgroup.processes)
    found = await asyncio.to_thread(sockets.container_sockets, pids)
    for line in sockets.what_happens(found, request.tcp):
        log.info("socket.judged", fate=line)
    hooks = await asyncio.to_thread(
        lambda: mounts.hook_mounts(
            target.spec, target.bundle.rootfs, read_mountinfo(str(target.init_pid)), read_mountinfo()
        )
    )
    require_room(request, _memory_bytes(target))
    options = CriuOptions(
        tcp=request.tcp,
        network_lock=sockets.needs_network_lock(found, request.tcp),
        shell_job=request.options.terminal or target.spec.terminal,
        ext_unix_sk=request.options.external_unix_sockets or bool(sockets.external_unix(found)),
        libdir=target.config.criu_libdir,
        extra=tuple(mounts.dump_lines(hooks)),
    )
    configuration = write_config(target.bundle.path, options, [users_file(target.spec, target.config, runtime.name)])
    manifest = Manifest(
        id=Path("/proc/sys/kernel/random/uuid").read_text().strip(),
        time=now(),
        source=_source(target, request),
        runtime=runtime,
        criu=replace(criu, options=configuration.lines),
        host=read_host(target.cgroup.version),
        tcp=request.tcp,
        terminal=target.spec.terminal,
        rootfs_diff=request.rootfs_diff,
        mounts=mounts.describe_mounts(target.spec, target.bundle.rootfs, hooks),
    )
    return _Look(pids, hooks, configuration, manifest, key, target.spec)


async def _run_criu(
    target: Target, request: DumpRequest, operation: Operation, look: _Look, digester: Digester
) -> None:
    words = Criu(
        request.image,
        request.work,
        tcp_established=request.tcp == "established",
        ext_unix_sk=request.options.external_unix_sockets,
        shell_job=request.options.terminal or target.spec.terminal,
        file_locks=True,
        extra=_mode(request.options.cgroups_mode),
    )
    runtime = replace(target.runtime, env={**target.runtime.env, **look.configuration.environment})
    with operation.step("dump", total_bytes=_memory_bytes(target)) as step, _progress(operation, request.image):
        with digester.following(request.image):
            await runtime.checkpoint(
                target.id, words, leave_running=not _criu_kills(request), empty_ns=request.options.empty_namespaces
            )
        step.bytes = _size_of(request.image)


def _criu_kills(request: DumpRequest) -> bool:
    """Tell whether CRIU itself must end the container.

    Connections that are to go on elsewhere must vanish without a word to their peers; only CRIU can end them so.
    """
    return request.exit and request.tcp == "established"


def _write_rootfs_diff(target: Target, image: Path) -> int:
    overlay = find_overlay(target.bundle.rootfs)
    hidden = [str(mount.get("destination") or "") for mount in target.spec.mounts]
    return write_diff(overlay, image / ROOTFS_DIFF, exclude=hidden).bytes


def _add_own_files(target: Target, request: DumpRequest) -> None:
    """Add the logs that belong to the image, and what its container was."""
    for name in (LOG, STATISTICS):
        if (request.work / name).exists() and not (request.image / name).exists():
            copy_private(request.work / name, request.image / name)
    spec = without_claim(target.spec.document)
    write_private(request.image / SPEC, json.dumps(spec, separators=(",", ":"), ensure_ascii=False))


def _finish(
    request: DumpRequest,
    operation: Operation,
    look: _Look,
    detached: Detached | None,
    digester: Digester,
    sealed: Sealed | None,
) -> Dumped:
    """Write the manifest, which makes the files an image; they are in its directory, or encrypted where `sealed`."""
    processes = criu_images.processes(request.image)
    there = {process.pid for process in processes}  # one that has ended since it was locked waits for no GPU
    manifest = replace(
        look.manifest,
        stdio=_stdio_kinds(request.image / "descriptors.json"),
        processes=tuple(Process(process.pid, process.name, process.rss_bytes) for process in processes),
        cuda_processes=tuple(one for one in detached.cuda_processes if one.pid in there) if detached else (),
        gpus=detached.gpus if detached else (),
        visible_gpus=detached.visible_gpus if detached else (),
        released=tuple(one for one in detached.released if one.pid in there) if detached else (),
        vram=detached.vram if detached else (),
        arena=detached.arena if detached else (),
        data_path=detached.data_path if detached else DataPath("plain", "no GPU state"),
        security=security_of(look.spec, criu_credentials.credentials(request.image)),
        files=_files(request.image, (*detached.vram, *detached.arena) if detached else (), digester),
        steps=tuple(step for step in operation.steps if step.seconds),
    )
    if sealed is not None:
        manifest = sealed.manifest(manifest)
    manifest = sign(manifest, look.key)
    return Dumped(manifest, write_manifest(request.destination or request.image, manifest, durable=request.durable))


def _files(image: Path, moved: Sequence[VramFile | ArenaFile], digester: Digester) -> tuple[File, ...]:
    """Return all files of the image; those with VRAM bytes were digested when they were written."""
    done = {file.file: File(file.file, file.size, file.digest) for file in moved}
    rest = digester.files(image, [name for name in payload_names(image) if name not in done])
    return tuple(sorted([*done.values(), *rest], key=lambda file: file.name))


def _stdio_kinds(descriptors: Path) -> tuple[StdioKind, ...]:
    """Return what 0, 1 and 2 were, by the names that the runtime has noted."""
    try:
        names = json.loads(read_plain(descriptors, most=MOST_DESCRIPTORS))
    except (OSError, ValueError, RecursionError):
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(map(_stdio_kind, names))


def _stdio_kind(name: str) -> StdioKind:
    if name.startswith("pipe:"):
        return "pipe"
    if name.startswith("socket:"):
        return "socket"
    if name == os.devnull:
        return "null"
    return "terminal" if name.startswith("/dev/pts") else "file" if name.startswith("/") else "other"


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


async def _set_frozen(target: Target, frozen: bool) -> None:
    """Freeze or thaw, unless the container has ended meanwhile."""
    if target.cgroup is None or not target.cgroup.exists:
        return
    try:
        await to_the_end(target.cgroup.freeze if frozen else target.cgroup.thaw)
    except FileNotFoundError:
        pass  # it ended between the look and the order


def _memory_bytes(target: Target) -> int:
    """Return about how much memory the processes hold, which is about what CRIU writes."""
    total = 0
    for pid in target.cgroup.processes() if target.cgroup is not None else ():
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


@contextmanager
def _progress(operation: Operation, image: Path):  # type: ignore[no-untyped-def]  # a generator of nothing
    """Let the operation tell how much is written; looked up only when somebody asks."""
    operation.measure = partial(_size_of, image)
    try:
        yield
    finally:
        operation.measure = None


def _size_of(directory: Path) -> int:
    """Return what CRIU has written, VRAM's files aside."""
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.name.endswith(".img"))
    except FileNotFoundError:
        return 0


def _mode(cgroups_mode: str) -> tuple[str, ...]:
    return (f"--manage-cgroups-mode={cgroups_mode}",) if cgroups_mode else ()
