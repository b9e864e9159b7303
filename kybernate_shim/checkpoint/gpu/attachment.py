"""Processes that were restored from an image get the GPUs of their new container."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from kybernate_shim.checkpoint.compat import Difference
from kybernate_shim.checkpoint.gpu.arena import ArenaReload
from kybernate_shim.checkpoint.gpu.container_gpus import ContainerGpus
from kybernate_shim.checkpoint.gpu.room import ahead, await_room, bytes_on
from kybernate_shim.checkpoint.gpu.usage import inner_pid
from kybernate_shim.checkpoint.gpu.vram import VramReload
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import NotBack
from kybernate_shim.gpu import gpu_map, sequence
from kybernate_shim.gpu.claims import claimed
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.gpu_map import GpuMismatch
from kybernate_shim.gpu.helper_answers import CudaInfo, NodeGpu, State
from kybernate_shim.linux.device_nodes import make_char_device
from kybernate_shim.oci.gpu_spec import VISIBLE
from kybernate_shim.sizes import NO_NODE
from kybernate_shim.trust.requester import requester_of
from kybernate_shim.trust.rights import Right, may
from kybernate_shim.vram_io.errors import VramError

MOMENT = 2.0  # seconds for which the arena may have more of a GPU than the process needs that it brings back


class Attachment:
    """Compares an image with the GPUs of one container, reads ahead, and attaches the restored processes."""

    def __init__(self, gpus: ContainerGpus) -> None:
        self._gpus = gpus
        self._back, self._arena_back = self._ways_back()
        self._expected: Sequence[NodeGpu] = ()  # where a restore will compute

    async def compare(self, manifest: Manifest) -> list[Difference]:
        """Return what speaks against bringing the image's processes to the GPUs that are here."""
        self._back, self._arena_back = self._ways_back()  # by the settings of this restore
        try:
            async with self._gpus.helper() as helper:
                info = await helper.info()
                plan = self._plan(manifest, info)
                await await_room(helper, plan.bytes, MOMENT)
        except (CudaError, GpuMismatch) as error:
            return [Difference("GPU", "", str(error), "refusal")]
        self._expected = [gpu for gpu in info.gpus if gpu.uuid in plan.bytes]
        # The arena's gate is a lock that others may hold.
        return [*_driver_findings(manifest, info), *await asyncio.to_thread(self._arena_back.compare, manifest)]

    def _ways_back(self) -> tuple[VramReload, ArenaReload]:
        children = self._gpus.target.children
        return VramReload(children, self._gpus.settings, self._gpus.log), ArenaReload(children, self._gpus.settings)

    @asynccontextmanager
    async def expecting(self, image: Image) -> AsyncIterator[None]:
        """Enclose the whole of a restore after `compare`, and read VRAM bytes ahead meanwhile."""
        nodes = {gpu.node for gpu in self._expected}
        near = nodes.pop() if len(nodes) == 1 else NO_NODE
        async with self._back.expecting(image), self._arena_back.expecting(image, near, self._get_ready):
            yield

    async def _get_ready(self, pid: int) -> None:
        """Have the arena ready for what process `pid` reads; what is wrong with it shows when it is needed."""
        with suppress(CudaError):
            async with self._gpus.helper() as helper:
                await helper.expect(pid, [gpu.uuid for gpu in self._expected], self._gpus.limits.restore)

    async def attach(self, image: Image, operation: Operation) -> None:
        """Bring restored processes onto the GPUs of their new container. Raises NotBack with them still off."""
        assert self._gpus.target.cgroup is not None
        manifest = image.manifest
        wanted = {process.pid for process in manifest.cuda_processes}
        try:
            async with self._gpus.helper() as helper:
                info = await helper.info()
                plan = self._plan(manifest, info)
                waiting = await self._gpus.in_state(helper, State.CHECKPOINTED)
                names = {inner_pid(process.pid): process.pid for process in waiting}
                if missing := wanted - names.keys():
                    raise NotBack(
                        f"{len(wanted)} processes of the image held CUDA state, and the driver does not report that"
                        f" {', '.join(map(str, sorted(missing)))} (process IDs in the container) wait for a GPU"
                    )
                pids = [process.pid for process in waiting]
                self._gpus.record(pids, whole=False)
                self._make_device_nodes()
                inner = {name: pid for name, pid in names.items() if name is not None}
                await self._back.fill(image, inner, operation)
                await self._arena_back.hand_over(image, inner, operation)
                # What is copied ahead, as bytes come from the image, may take more than is claimed: alone to the end.
                async with claimed(plan.bytes, alone_seconds=None) as claim:
                    node = await await_room(helper, plan.bytes, 0, claim)
                    claim.grant()
                    self._gpus.warn_of_neighbours(node, plan.bytes.keys())
                    with operation.showing("cuda-resume"):
                        proof = partial(self._prove, image) if manifest.vram or manifest.arena else None
                        early = ahead(manifest.gpus, inner, plan, node)
                        steps = await sequence.resume(
                            helper, pids, plan.pairs, self._gpus.limits, proof=proof, ahead=early, taken=claim.end
                        )
        except (CudaError, GpuMismatch, VramError) as error:
            raise NotBack("; ".join([str(error), *getattr(error, "__notes__", [])])) from error
        self._gpus.record(())
        operation.add_steps(steps, "cuda-restore", sum(process.bytes for process in manifest.cuda_processes))

    async def _prove(self, image: Image) -> None:
        """Return when all bytes were compared with the manifest's digests. Raises a VramError."""
        await asyncio.gather(self._back.prove(image), self._arena_back.loaded(image))

    def _plan(self, manifest: Manifest, info: CudaInfo) -> gpu_map.GpuPlan:
        spec, config = self._gpus.target.spec, self._gpus.target.config
        believed = may(requester_of(spec), Right.VISIBLE_DEVICES, config)
        usable = self._gpus.usable(info, devices_only=not believed)
        try:
            return gpu_map.make_plan(
                [gpu_map.Used(gpu.uuid, gpu.model, bytes_on(gpu)) for gpu in manifest.gpus],
                manifest.visible_gpus,
                [gpu for gpu in info.gpus if gpu.uuid in usable],
                gpu_map.parse_map(config.pods_choice(spec.annotations, gpu_map.ANNOTATION)),
            )
        except GpuMismatch as error:
            if believed:
                raise
            raise GpuMismatch(
                f"{error}. For a pod, the devices in its container's configuration count, as CDI adds them;"
                f" {VISIBLE} counts only with `gpu.visible_devices_env = true` on this node"
            ) from error

    def _make_device_nodes(self) -> None:
        """Add the GPUs of the new container to its /dev: CRIU restores the old one's, and the driver opens by name."""
        for device in self._gpus.target.spec.linux.get("devices") or ():
            if not gpu_map.device_numbers([str(device.get("path"))]) or device.get("type") != "c":
                continue
            number = os.makedev(device["major"], device["minor"])
            try:
                make_char_device(self._gpus.target.init_pid, device["path"], number)
            except OSError as error:
                raise NotBack(f"{device['path']} cannot be created in the container: {error.strerror}") from error


def _driver_findings(manifest: Manifest, info: CudaInfo) -> Iterable[Difference]:
    for wanted in sorted({gpu.driver for gpu in manifest.gpus} - {"", info.driver_version}):
        same_branch = wanted.partition(".")[0] == info.driver_version.partition(".")[0]
        yield Difference("GPU driver", wanted, info.driver_version or "unknown", "risk" if same_branch else "refusal")
