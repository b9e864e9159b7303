"""The device plugin against kubelet's rules: registration, restarts, health, choice, allocation, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import structlog

from kybernate.agent.device_plugin import plugin
from kybernate.agent.device_plugin.answers import NodeGpus, allocation, devices, preferred
from kybernate.agent.device_plugin.plugin import DevicePlugin
from kybernate.agent.device_plugin.resource import Resource
from kybernate.node.failure import Refused
from kybernate.seats.groups import Group, Place, Profile, places
from tests.fakes.kubelet import AdmissionRefused, Kubelet

ONE = Profile("gpu-1x-seat", "kyb.ai/gpu-1x-seat", 1, 4)
TWO = Profile("gpu-2x-seat", "kyb.ai/gpu-2x-seat", 2, 3)
GROUPS = (Group("G0", (0,)), Group("G1", (1,)), Group("G01", (0, 1)))
PLACES = tuple(places((ONE, TWO), GROUPS))
GPUS = NodeGpus({0: "GPU-a", 1: "GPU-b"}, {0: 0, 1: 1}, frozenset({0, 1}))
BY_NAME = {place.name: place for place in PLACES}


class Node:
    """A plugin, and the GPUs that its driver reports."""

    def __init__(self, directory: Path) -> None:
        self.gpus: NodeGpus | None = GPUS
        log = structlog.get_logger()
        self.plugin = DevicePlugin([], directory, directory / "kubelet.sock", self.look, log)
        for profile in (ONE, TWO):
            mine = [place for place in PLACES if place.profile == profile]
            self.plugin.resources.append(Resource(profile, mine, directory, self.plugin.taken, by_cdi=False, log=log))

    async def look(self) -> NodeGpus | None:
        return self.gpus


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[None]:
    await node.plugin.refresh()
    work = asyncio.create_task(node.plugin.run())
    try:
        yield
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        await node.plugin.close()


def with_kubelet(test: Callable[[Kubelet, Node], Awaitable[None]], directory: Path) -> None:
    async def run() -> None:
        kubelet, node = Kubelet(directory), Node(directory)
        await kubelet.start()
        try:
            async with running(node):
                await kubelet.has(ONE.resource, 8)
                await kubelet.has(TWO.resource, 3)
                await test(kubelet, node)
        finally:
            await kubelet.stop()

    asyncio.run(run())


def test_every_profile_is_a_resource(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet, node: Node) -> None:
        assert sorted(kubelet.registrations) == [ONE.resource, TWO.resource]
        assert kubelet.devices[TWO.resource] == {"g01-s0", "g01-s1", "g01-s2"}

    with_kubelet(test, tmp_path)


def test_it_registers_again_after_each_restart_of_kubelet(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet, node: Node) -> None:
        await kubelet.admit("a", ONE.resource)
        for _ in range(2):
            await kubelet.stop()
            await kubelet.start()
            await kubelet.has(ONE.resource, 8)
            await kubelet.has(TWO.resource, 3)
        answer = await kubelet.admit("a", ONE.resource)  # its container starts again
        assert answer.envs["KYB_GPU_SEAT"] == "g0-s0"

    with_kubelet(test, tmp_path)


def test_a_plugin_registers_before_kubelet_has_noticed_the_end_of_the_last_one(tmp_path: Path) -> None:
    async def run() -> None:
        kubelet, killed = Kubelet(tmp_path), Node(tmp_path)
        await kubelet.start()
        await killed.plugin.refresh()
        for one in killed.plugin.resources:
            await one.register()
        async with running(Node(tmp_path)):
            async with kubelet.changed:
                twice = [ONE.resource, TWO.resource] * 2
                await asyncio.wait_for(kubelet.changed.wait_for(lambda: kubelet.registrations == twice), 20)
            await kubelet.admit("a", TWO.resource)
        await killed.plugin.close()
        await kubelet.stop()

    asyncio.run(run())


def test_it_registers_again_where_kubelet_has_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "LOOK_SECONDS", 0.05)

    async def test(kubelet: Kubelet, node: Node) -> None:
        await kubelet.let_go()
        async with kubelet.changed:
            await asyncio.wait_for(
                kubelet.changed.wait_for(
                    lambda: sorted(kubelet.registrations) == [ONE.resource] * 2 + [TWO.resource] * 2
                ),
                20,
            )
        await kubelet.has(ONE.resource, 8)

    with_kubelet(test, tmp_path)


def test_containers_are_spread_over_the_least_loaded_groups(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet, node: Node) -> None:
        found = [(await kubelet.admit(name, ONE.resource)).envs["KYB_GPU_SEAT"] for name in "abcd"]
        assert found == ["g0-s0", "g1-s0", "g0-s1", "g1-s1"]

    with_kubelet(test, tmp_path)


def test_seats_of_other_profiles_count_as_load(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet, node: Node) -> None:
        await kubelet.admit("a", ONE.resource)
        await node.plugin.refresh()
        assert node.plugin.holders == {"g0-s0": "default/a/main"}
        assert [place.name for place in node.plugin.taken()] == ["g0-s0"]
        kubelet.containers.clear()
        await node.plugin.refresh()
        assert list(node.plugin.taken()) == []

    with_kubelet(test, tmp_path)


def test_all_seats_can_be_taken_and_no_more(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet, node: Node) -> None:
        for number in range(8):
            await kubelet.admit(f"pod-{number}", ONE.resource)
        with pytest.raises(AdmissionRefused, match="unavailable"):
            await kubelet.admit("more", ONE.resource)
        assert len({names[0] for _, names in kubelet.containers.values()}) == 8

    with_kubelet(test, tmp_path)


def test_two_units_are_refused_in_words(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet, node: Node) -> None:
        with pytest.raises(
            AdmissionRefused, match=r"one seat, and asks for 2 \(g0-s0, g1-s0\): set the resource's limit"
        ):
            await kubelet.admit("greedy", ONE.resource, 2)
        await kubelet.admit("modest", ONE.resource)

    with_kubelet(test, tmp_path)


def test_a_sick_gpu_takes_its_own_seats_and_they_come_back(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet, node: Node) -> None:
        node.gpus = NodeGpus(GPUS.uuids, GPUS.numa, frozenset({0}))
        await node.plugin.refresh()
        await kubelet.has(ONE.resource, 4)
        await kubelet.has(TWO.resource, 0)
        assert kubelet.unhealthy[ONE.resource] == {f"g1-s{number}" for number in range(4)}
        assert (await kubelet.admit("a", ONE.resource)).envs["KYB_GPU_GROUP"] == "G0"
        node.gpus = GPUS
        await node.plugin.refresh()
        await kubelet.has(TWO.resource, 3)

    with_kubelet(test, tmp_path)


def test_a_driver_that_does_not_answer_makes_no_seat_unhealthy(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet, node: Node) -> None:
        node.gpus = None
        await node.plugin.refresh()
        assert kubelet.unhealthy[ONE.resource] == set()
        await kubelet.admit("a", ONE.resource)

    with_kubelet(test, tmp_path)


def test_a_plugin_that_ends_leaves_no_device(tmp_path: Path) -> None:
    async def run() -> None:
        kubelet = Kubelet(tmp_path)
        await kubelet.start()
        async with running(Node(tmp_path)):
            await kubelet.has(ONE.resource, 8)
        await kubelet.has(ONE.resource, 0)
        assert not list(tmp_path.glob("kybernate-*"))
        await kubelet.stop()

    asyncio.run(run())


# ---- the answers themselves


def test_a_seat_has_the_numa_nodes_of_its_group() -> None:
    found = {one.ID: [node.ID for node in one.topology.nodes] for one in devices(PLACES, GPUS)}
    assert (found["g0-s0"], found["g01-s0"]) == ([0], [0, 1])
    (unknown, *_) = devices(PLACES, NodeGpus(GPUS.uuids, {0: -1, 1: -1}, GPUS.healthy))
    assert not unknown.HasField("topology")


def test_names_that_are_not_known_fail_nothing() -> None:
    assert preferred(BY_NAME, ["g0-s1", "gone"], ["gone", "g1-s3"], 2, []) == ["g1-s3", "g0-s1"]
    with pytest.raises(Refused, match="this node has no seat gone"):
        allocation(BY_NAME, ["gone"], GPUS, by_cdi=False, control_nodes=())


def test_devices_are_nodes_or_names_of_cdi() -> None:
    nodes = allocation(BY_NAME, ["g01-s0"], GPUS, by_cdi=False, control_nodes=("/dev/nvidiactl",))
    assert [one.host_path for one in nodes.devices] == ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]
    assert nodes.envs["NVIDIA_VISIBLE_DEVICES"] == "void"
    cdi = allocation(BY_NAME, ["g01-s0"], GPUS, by_cdi=True, control_nodes=("/dev/nvidiactl",))
    assert [one.name for one in cdi.cdi_devices] == ["nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b"]
    assert not cdi.devices
    assert "NVIDIA_VISIBLE_DEVICES" not in cdi.envs


def test_annotations_say_which_seat_a_container_has() -> None:
    found = allocation(BY_NAME, ["g01-s2"], GPUS, by_cdi=False, control_nodes=())
    assert dict(found.annotations) == {
        "kyb.ai/seat": "g01-s2",
        "kyb.ai/group": "G01",
        "kyb.ai/gpus": "0,1",
        "kyb.ai/profile": "gpu-2x-seat",
    }


def test_a_place_is_of_one_profile() -> None:
    assert all(isinstance(one, Place) and len(one.group.gpus) == one.profile.group_size for one in PLACES)
