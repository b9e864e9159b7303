"""Seats on the node's GPUs: their groups, once the driver has answered, and kubelet's device plugin for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kybernate.agent.device_plugin.answers import NodeGpus
from kybernate.agent.device_plugin.plugin import DevicePlugin
from kybernate.agent.device_plugin.resource import Resource
from kybernate.agent.inventory.gpus import ask_driver
from kybernate.agent.part import Part, Work
from kybernate.agent.seat_settings import configuration_of
from kybernate.node.failure import Invalid
from kybernate.seats.configuration import Configuration, SeatsInvalid
from kybernate.seats.groups import Topology
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import CudaInfo

if TYPE_CHECKING:
    from kybernate.agent.assembly import Agent

ADVICE = "docs/seats.md describes the configuration; the agent starts again once it is right"
AGAIN_SECONDS = 10.0  # until a driver that did not answer is asked again


class Seats(Part):
    """Without a configuration of seats, it does nothing."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent
        self._configuration: Configuration | None = None

    async def start(self) -> None:
        """Raises Invalid."""
        try:
            self._configuration = configuration_of(self._agent.settings().seats)
        except SeatsInvalid as error:
            raise Invalid(str(error), state="the agent does not run", advice=ADVICE) from error

    def work(self) -> Iterable[Work]:
        if self._configuration is not None and self._configuration.profiles:
            yield self._run(self._configuration)

    async def _run(self, configuration: Configuration) -> None:
        log, settings = self._agent.log, self._agent.settings().seats
        topology = topology_of(await self._first_answer())
        try:
            places = configuration.places(topology)
        except SeatsInvalid as error:
            log.error("seats.not_used", error=str(error), advice=ADVICE)
            return
        plugin = DevicePlugin([], settings.device_plugins, settings.pod_resources, self._look, log)
        self.closing.push_async_callback(plugin.close)
        for profile in configuration.profiles:
            plugin.resources.append(
                Resource(
                    profile,
                    [place for place in places if place.profile == profile],
                    settings.device_plugins,
                    plugin.taken,
                    by_cdi=settings.devices == "cdi",
                    log=log,
                )
            )
        await plugin.refresh()  # so that kubelet's first list is the right one
        async with asyncio.TaskGroup() as group:
            group.create_task(plugin.run())
            group.create_task(plugin.watch())

    async def _first_answer(self) -> CudaInfo:
        """Return what the driver reports, once it answers and has GPUs: groups cannot be made before that."""
        reported = ""
        while True:
            try:
                info = await ask_driver()
                problem = "" if info.gpus else "the driver reports no GPU"
            except CudaError as error:
                problem = str(error)
            else:
                if info.gpus:
                    return info
            if problem != reported:
                self._agent.log.warning("gpus.not_reported", error=problem, state="no seats are advertised until then")
                reported = problem
            await asyncio.sleep(AGAIN_SECONDS)

    async def _look(self) -> NodeGpus | None:
        try:
            info = await ask_driver()
        except CudaError:
            return None  # which GPU is sick is not known, and pods of an unhealthy one could not restart
        return gpus_of(info)


def gpus_of(info: CudaInfo) -> NodeGpus:
    """Return the node's GPUs by the numbers of their device nodes. Those that the driver reports are healthy."""
    numbered = {_number(gpu.number, place): gpu for place, gpu in enumerate(info.gpus)}
    return NodeGpus(
        {index: gpu.uuid for index, gpu in numbered.items()},
        {index: gpu.node for index, gpu in numbered.items()},
        frozenset(numbered),
    )


def topology_of(info: CudaInfo) -> Topology:
    """Return the GPUs' topology, as far as the driver's answer has it: which are near one NUMA node."""
    gpus = gpus_of(info)
    count = max(gpus.numa, default=-1) + 1
    numa = tuple(gpus.numa.get(index, -1) for index in range(count))

    def link(one: int, other: int) -> str:
        if one == other:
            return "X"
        return "NODE" if numa[one] == numa[other] != -1 else "SYS"

    return Topology(tuple(tuple(link(a, b) for b in range(count)) for a in range(count)), numa)


def _number(number: int | None, place: int) -> int:
    return place if number is None else number
