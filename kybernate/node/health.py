"""What this node can do and what keeps it from more, each with what to do about it.

Asks CRIU and driver. Changes nothing but the modes of files, on demand.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from kybernate.node import containerd_facts, containerd_health, left_locked
from kybernate.node.exposed import Exposed, find, repair
from kybernate.node.finding import HealthFinding, ask_program, looked
from kybernate.node.runtimes import runtimes
from kybernate_shim.arena import banks
from kybernate_shim.arena.banks import Bank
from kybernate_shim.arena.memory import Memory
from kybernate_shim.checkpoint.criu.config import CUDA_PLUGIN, OLDEST, parse_version
from kybernate_shim.config import DEFAULT_PATH, Config, ConfigInvalid
from kybernate_shim.errors import Refused
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import CudaInfo
from kybernate_shim.gpu.helper_client import cuda_helper
from kybernate_shim.gpu.preflight import denied
from kybernate_shim.imports import DRIVER
from kybernate_shim.linux.cgroup.cgroup import hierarchy_version
from kybernate_shim.linux.huge_pages import SWITCH
from kybernate_shim.linux.numa import memory_of_nodes
from kybernate_shim.sizes import GRAIN, NO_NODE, NodeSizes
from kybernate_shim.trust.places import require_private
from kybernate_shim.vram_io.image_pool import lacking

MAP_API = 13000  # CUDA 13.0, driver 580: the first that moves a process to another GPU
IO_URING = Path("/proc/sys/kernel/io_uring_disabled")
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
NO_TRACING = "3"  # not even root, until the next start of the machine


def examine(*, fix: bool = False) -> list[HealthFinding]:
    """Look at everything; a look that fails is a finding itself. With `fix`, files are closed to other users."""
    try:
        config = Config.load()
    except ConfigInvalid as error:
        kept = "the CUDA helper and running daemons keep the previous settings, new containers are refused"
        return [HealthFinding("configuration", "bad", f"{error}; {kept}", f"correct {DEFAULT_PATH}")]
    looks: Sequence[tuple[str, Callable[[Config], Iterator[HealthFinding]]]] = (
        ("configuration", _configuration),
        ("kernel", _kernel),
        ("cgroup", _cgroup),
        ("CRIU", _criu),
        ("containerd", _containerd),
        ("runtimes", runtimes),
        ("tiers", _tiers),
        ("files", partial(_files, fix=fix)),
        ("VRAM bytes", _data_path),
        ("arena", _arena),
        ("GPUs", _gpus),
        ("GPU state", partial(_left_locked, fix=fix)),
    )
    return [finding for subject, look in looks for finding in looked(subject, partial(look, config))]


def _configuration(config: Config) -> Iterator[HealthFinding]:
    for warning in config.warnings:
        yield HealthFinding("configuration", "note", warning, f"correct {DEFAULT_PATH}")
    if os.geteuid():
        yield HealthFinding("user", "note", "not root", "run as root for all findings about CRIU and the driver")


def _kernel(config: Config) -> Iterator[HealthFinding]:
    yield HealthFinding("kernel", "ok", f"{os.uname().release} {os.uname().machine}")
    huge = _chosen(SWITCH)
    yield HealthFinding("huge pages", "ok" if huge != "never" else "note", huge or "unknown", _huge_pages_advice(huge))
    disabled = IO_URING.read_text().strip() if IO_URING.exists() else "0"
    advice = "" if disabled == "2" else "programs that use it cannot be checkpointed; sysctl kernel.io_uring_disabled=2"
    yield HealthFinding(
        "io_uring", "ok" if disabled == "2" else "note", "off" if disabled == "2" else "allowed", advice
    )


def _chosen(switch: Path) -> str:
    """Return the word in brackets of a file such as `always [madvise] never`."""
    words = switch.read_text().split() if switch.exists() else []
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def _huge_pages_advice(huge: str) -> str:
    return "VRAM moves at half the speed; echo madvise > " + str(SWITCH) if huge == "never" else ""


def _cgroup(config: Config) -> Iterator[HealthFinding]:
    version = hierarchy_version()
    yield HealthFinding("cgroup", "ok", f"version {version}")


def _criu(config: Config) -> Iterator[HealthFinding]:
    program = str(config.criu or "criu")
    status, words = ask_program(program, "--version")
    version = words.partition("Version:")[2].split()[:1]
    if status or not version:
        yield HealthFinding("CRIU", "bad", words or "does not run", "install CRIU 4.1 or newer, or name it by `criu`")
        return
    if parse_version(version[0]) < OLDEST:
        yield HealthFinding("CRIU", "bad", version[0], f"install {'.'.join(map(str, OLDEST))} or newer")
        return
    status, words = ask_program(program, "check")
    advice = "`criu check` shows what the kernel lacks" if status else ""
    yield HealthFinding("CRIU", "bad" if status else "ok", f"{version[0]}: {words or 'works'}", advice)
    if config.criu_libdir is not None:
        plugin = config.criu_libdir / CUDA_PLUGIN
        advice = "containers with GPU state are refused while it is installed; remove it from that directory"
        there = plugin.exists()
        yield HealthFinding(
            "CRIU's plugins",
            "bad" if there else "note",
            str(plugin if there else plugin.parent),
            advice if there else "",
        )


def _containerd(config: Config) -> Iterator[HealthFinding]:
    yield from containerd_health.findings(containerd_facts.gather())


def _tiers(config: Config) -> Iterator[HealthFinding]:
    place = config.checkpoint_root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    yield HealthFinding("checkpoint root", "ok", f"{config.checkpoint_root}: {free / 2**30:.1f} GiB free")
    if (pool := config.gpu.image_pool) is not None and config.gpu.image_pool_files:
        missing = lacking(pool, config.gpu.image_pool_files)
        advice = (
            "`kybernate pool --fill` allocates it, or reports why not; the CUDA helper allocates it while it is idle"
        )
        yield HealthFinding(
            "image pool",
            "note" if missing else "ok",
            f"{pool}: {len(missing)} of {len(config.gpu.image_pool_files)} files missing" if missing else str(pool),
            advice if missing else "",
        )


def _files(config: Config, *, fix: bool) -> Iterator[HealthFinding]:
    """Report what other users can read or change, by directory."""
    uses = {config.checkpoint_root: "checkpoint and restore", config.work_root: "checkpoint and restore"}
    for root, use in {config.parking_root: "park", **uses}.items():
        try:
            require_private(root)
        except Refused as error:
            yield HealthFinding("files", "bad", str(error), f"without it, every {use} there is refused")
        except OSError:
            pass  # it is allocated at its first use, or cannot be seen without root
    try:
        exposed = find(config)
    except OSError as error:
        yield HealthFinding("files", "note", f"cannot be examined: {error}", "run as root")
        return
    groups: dict[str, list[Exposed]] = {}
    for one in exposed:
        groups.setdefault(one.path if one.kind == "directory" else str(Path(one.path).parent), []).append(one)
    for directory, group in groups.items():
        yield _closed(directory, group) if fix else _open(directory, group)
    if not exposed:
        yield HealthFinding("files", "ok", "no other user can read images, logs and keys, or change the configuration")


def _open(directory: str, group: Sequence[Exposed]) -> HealthFinding:
    more = f", and {len(group) - 1} more in {directory}" if len(group) > 1 else ""
    return HealthFinding(
        "files", "note", f"open to other users: {group[0]}{more}", "`kybernate doctor --fix` closes it"
    )


def _closed(directory: str, group: Sequence[Exposed]) -> HealthFinding:
    left = []
    for one in group:
        try:
            repair(one)
        except OSError as error:
            left.append(str(error))
    closed = len(group) - len(left)
    if left:
        return HealthFinding("files", "note", f"{'; '.join(left)}; {closed} closed", "it stays open to other users")
    return HealthFinding("files", "ok", f"closed to other users: {directory}, {closed} in all")


def _data_path(config: Config) -> Iterator[HealthFinding]:
    if config.gpu.data_path == "plain":
        yield HealthFinding(
            "VRAM bytes", "note", "through CRIU, by gpu.data_path", "the direct path takes a fraction of the time"
        )
    elif YAMA.exists() and YAMA.read_text().strip() == NO_TRACING:
        advice = "every checkpoint needs it; start the node with a smaller kernel.yama.ptrace_scope"
        yield HealthFinding("VRAM bytes", "bad", f"{YAMA} is {NO_TRACING}: no process may trace", advice)
    else:
        yield HealthFinding("VRAM bytes", "ok", f"directly, huge pages: {config.gpu.huge_pages}")


def _arena(config: Config) -> Iterator[HealthFinding]:
    sizes = config.gpu.arena
    if not sizes and not Memory(sizes).size:
        return
    if fault := banks.fault_of(sizes, memory_of_nodes()):
        yield HealthFinding("arena", "bad", _by_node(sizes), fault)
        return
    memory = Memory(sizes)
    try:
        if there := memory.banks:
            found = f"{_by_node((bank.node, bank.extent.size) for bank in there)}; {_gib(memory.free())} free"
            found += "".join(f"; {_gib(size)} of {account}" for account, size in sorted(memory.holders().items()))
        else:
            found = f"{_by_node(sizes)}, allocated at its first use"
    except OSError as error:
        yield HealthFinding("arena", "note", f"cannot be examined: {error}", "run as root")
        return
    advice = _unused_size(memory, sizes)
    yield HealthFinding("arena", "note" if advice else "ok", found, advice)


def _by_node(sizes: Iterable[tuple[int, int]]) -> str:
    """Report the parts of the arena, of one NUMA node each."""
    return ", ".join(_gib(size) + (f" on NUMA node {node}" if node != NO_NODE else "") for node, size in sizes)


def _unused_size(memory: Memory, sizes: NodeSizes) -> str:
    """Say why gpu.arena is not in use yet as it is configured, and when it will be; "" if it is."""
    there = memory.banks
    if not there:
        return ""
    wanted = _by_node(sizes) or "none"
    if memory.surplus and memory.vacant:
        return f"gpu.arena is {wanted}: in effect at the next call of the CUDA helper"
    if memory.surplus:
        return (
            f"gpu.arena is {wanted}: in effect when no suspended container has memory there; resume or end those above."
            " Until then, no more than that is allocated"
        )
    return f"gpu.arena is {wanted}: it grows with the next suspend" if _lacks(there, sizes) else ""


def _lacks(there: Sequence[Bank], sizes: NodeSizes) -> bool:
    rounded = tuple((node, size // GRAIN * GRAIN) for node, size in sizes)
    return bool(banks.missing(there, rounded))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _gpus(config: Config) -> Iterator[HealthFinding]:
    try:
        info = asyncio.run(_ask_driver())
    except CudaError as error:
        there = DRIVER.exists()
        advice = "install the driver, and the package with its extra `gpu`" if there else ""
        yield HealthFinding("GPU driver", "bad" if there else "note", str(error), advice)
        return
    yield from _driver(info, config)
    memory = _memory_bytes()
    for gpu in info.gpus:
        free = "unknown" if gpu.free_bytes is None else f"{gpu.free_bytes / 2**30:.1f}"
        found = f"{gpu.name}, {free} of {gpu.total_bytes / 2**30:.1f} GiB free"
        if gpu.mig:
            yield HealthFinding(gpu.uuid, "bad", f"{found}, in MIG mode", "the driver does not checkpoint instances")
        elif gpu.total_bytes > memory:
            yield HealthFinding(
                gpu.uuid, "note", found, f"the node has only {memory / 2**30:.1f} GiB of host memory for its VRAM"
            )
        else:
            yield HealthFinding(gpu.uuid, "ok", found)


def _left_locked(config: Config, *, fix: bool) -> Iterator[HealthFinding]:
    """Report which processes wait for a dead shim; with `fix`, let them compute, or end those that never can."""
    try:
        for one in left_locked.find():
            if not fix:
                fate = "resumes them" if one.whole else "ends them: they cannot be resumed"
                yield HealthFinding("GPU state", "bad", str(one), f"`kybernate doctor --fix` {fate}")
            elif stuck := left_locked.repair(one):
                yield HealthFinding("GPU state", "bad", f"{one}; {'; '.join(stuck)}", "end the processes")
            else:
                yield HealthFinding("GPU state", "ok", f"{one}: {'running again' if one.whole else 'ended'}")
    except (CudaError, OSError) as error:
        yield HealthFinding("GPU state", "note", f"processes that a dead shim has left cannot be examined: {error}")


async def _ask_driver() -> CudaInfo:
    async with cuda_helper() as helper:
        return await helper.info()


def _driver(info: CudaInfo, config: Config) -> Iterator[HealthFinding]:
    version = info.driver_version or "unknown version"
    api = f"CUDA {info.api_version // 1000}.{info.api_version % 1000 // 10}"
    if info.missing_calls:
        yield HealthFinding(
            "GPU driver", "bad", f"{version} lacks {', '.join(info.missing_calls)}", "install 570 or newer"
        )
    elif pattern := denied(info.driver_version, config.gpu.denied_drivers):
        yield HealthFinding(
            "GPU driver", "bad", f"{version} is {pattern!r} of gpu.denied_drivers", "install another one"
        )
    elif info.api_version < MAP_API:
        yield HealthFinding("GPU driver", "note", f"{version}, {api}", "580 or newer also moves state to another GPU")
    else:
        yield HealthFinding("GPU driver", "ok", f"{version}, {api}, all calls are present")


def _memory_bytes() -> int:
    return psutil.virtual_memory().total
