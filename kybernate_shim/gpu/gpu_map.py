"""Which GPU a process is restored to: chosen by the GPUs that its container could open and the new one can.

The driver wants a map that names every GPU that the process could open, whatever CUDA_VISIBLE_DEVICES said, so the
unused ones are mapped as well; and the process must be able to open each of them again, the same GPU or the one that
the map names. Plain functions. Source: CUDA Driver API, CUcheckpointRestoreArgs; measured with driver 580.159.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kybernate_shim.gpu.errors import GpuPair
from kybernate_shim.gpu.helper_answers import NodeGpu

ANNOTATION = "kybernate.io/gpu-map"


class GpuMismatch(Exception):
    """The processes cannot come back to the GPUs that are here. The message names the fact that prevents it."""


@dataclass(frozen=True)
class Used:
    """A GPU as the checkpoint had it. `bytes` is what its processes held there."""

    uuid: str
    model: str
    bytes: int


@dataclass(frozen=True)
class GpuPlan:
    """Where everything goes. `pairs` is empty where nothing moves; `bytes` what each GPU must have free, by UUID."""

    pairs: tuple[GpuPair, ...]
    bytes: Mapping[str, int]


def parse_map(text: str) -> dict[str, str]:
    """Read `OLD=NEW[,OLD=NEW…]`, UUIDs of GPUs. Raises GpuMismatch."""
    moves: dict[str, str] = {}
    for entry in filter(None, re.split(r"[,\s]+", text)):
        old, equals, new = entry.partition("=")
        if not equals or not old.startswith("GPU-") or not new.startswith("GPU-") or old in moves:
            raise GpuMismatch(f"{ANNOTATION}: {entry!r} is not GPU-…=GPU-…, or names a GPU twice")
        moves[old] = new
    return moves


def make_plan(
    used: Sequence[Used],
    visible: Sequence[str],
    usable: Sequence[NodeGpu],
    explicit: Mapping[str, str],
) -> GpuPlan:
    """Choose a GPU for everything in `used`, which are some of the GPUs `visible` to the checkpointed container.

    `usable` are the GPUs that the new container may use, `explicit` overrides the choice. A GPU that is usable again is
    kept. Raises GpuMismatch; room is not looked at, see `require_room`.
    """
    here = {gpu.uuid: gpu for gpu in usable}
    moves = _explicit(explicit, used, visible, here)
    for one in used:
        if one.uuid not in moves and one.uuid in here and one.uuid not in moves.values():
            moves[one.uuid] = one.uuid
    for one in used:
        if one.uuid not in moves:
            moves[one.uuid] = _choose(one, [uuid for uuid in here if uuid not in moves.values()], here)
    for one in used:
        _require_alike(one, here[moves[one.uuid]])
    needed: dict[str, int] = {}
    for one in used:
        needed[moves[one.uuid]] = one.bytes
    return GpuPlan(_complete(moves, visible, list(here)), needed)


def require_room(plan: GpuPlan, node: Sequence[NodeGpu]) -> None:
    """Raise GpuMismatch where a GPU has not enough free memory: the driver loses a process that it cannot place."""
    for gpu in node:
        needed = plan.bytes.get(gpu.uuid, 0)
        if gpu.free_bytes is not None and gpu.free_bytes < needed:
            raise GpuMismatch(
                f"GPU {gpu.uuid} has {gpu.free_bytes >> 20} MiB free, {needed >> 20} MiB are needed: end or suspend"
                f" what uses it, or choose another by {ANNOTATION}"
            )


def usable_gpus(
    numbers: Sequence[int], visible: str | None, node: Sequence[NodeGpu], *, devices_only: bool = False
) -> list[str]:
    """Return the UUIDs of the GPUs that a container may use.

    `numbers` are those of its device nodes /dev/nvidiaN, which decide; without any, `visible` does, the value of
    NVIDIA_VISIBLE_DEVICES; without that, it may use them all, like a privileged container. With `devices_only`, nothing
    but device nodes gives it a GPU.
    """
    if numbers or devices_only:
        return [gpu.uuid for gpu in node if gpu.number in numbers]
    if visible in (None, "", "all", "none", "void"):
        return [gpu.uuid for gpu in node]
    names = (visible or "").split(",")
    return [gpu.uuid for index, gpu in enumerate(node) if gpu.uuid in names or str(index) in names]


def device_numbers(devices: Sequence[str]) -> list[int]:
    """Return the numbers of the GPUs among paths of device nodes."""
    return [int(found[1]) for path in devices if (found := re.fullmatch(r"/dev/nvidia(\d+)", path))]


def _explicit(
    wanted: Mapping[str, str], used: Sequence[Used], visible: Sequence[str], here: Mapping[str, NodeGpu]
) -> dict[str, str]:
    known = {*visible, *(one.uuid for one in used)}
    for old, new in wanted.items():
        if old not in known:
            raise GpuMismatch(f"{ANNOTATION}: the image has no GPU {old}, only {', '.join(sorted(known))}")
        if new not in here:
            raise GpuMismatch(f"{ANNOTATION}: the container has no GPU {new}, only {', '.join(here)}")
    if len(set(wanted.values())) < len(wanted):
        raise GpuMismatch(f"{ANNOTATION}: two GPUs cannot become one")
    return dict(wanted)


def _choose(one: Used, free: Sequence[str], here: Mapping[str, NodeGpu]) -> str:
    alike = [uuid for uuid in free if here[uuid].name == one.model]
    roomy = [uuid for uuid in alike if (here[uuid].free_bytes or 0) >= one.bytes]
    if choice := (*roomy, *alike, *free):
        return choice[0]
    raise GpuMismatch(f"the container has no GPU here for what was on {one.uuid}: give it as many as it had")


def _require_alike(one: Used, gpu: NodeGpu) -> None:
    if gpu.name != one.model:
        raise GpuMismatch(f"GPU {gpu.uuid} is a {gpu.name}, the image needs a {one.model}")
    if gpu.total_bytes < one.bytes:
        raise GpuMismatch(f"GPU {gpu.uuid} has {gpu.total_bytes >> 20} MiB, the image needs {one.bytes >> 20} MiB")


def _complete(moves: dict[str, str], visible: Sequence[str], here: Sequence[str]) -> tuple[GpuPair, ...]:
    """Complete `moves` to a map of all GPUs that the old container could open; empty where nothing moves."""
    rest = [uuid for uuid in visible if uuid not in moves]
    for old in rest:
        if old in here and old not in moves.values():
            moves[old] = old
    for old in (old for old in rest if old not in moves):
        left = [uuid for uuid in here if uuid not in moves.values()]
        if not left:
            raise GpuMismatch(
                f"the image comes from a container with {len(visible)} GPUs, and the driver requires a target for each:"
                f" this one has {len(here)}; give it as many"
            )
        moves[old] = left[0]
    if all(old == new for old, new in moves.items()):
        return ()
    return tuple(GpuPair(old, moves[old]) for old in visible or moves)
