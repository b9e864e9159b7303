"""The inventory apart from containers: what is kept of a record, GPUs, tiers, node, events to containerd."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.events.containerd import QUEUE_LIMIT, ContainerdSink, envelope_of, topic_of
from kybernate.agent.inventory import node_facts
from kybernate.agent.inventory.gpus import Activity, Gpus, Users, cgroup_of, container_of, pci_addresses
from kybernate.agent.inventory.happenings import happenings
from kybernate.agent.inventory.node_facts import NodeFacts, memory_message
from kybernate.agent.inventory.notices import ENDED, Notice, notice_of
from kybernate.agent.inventory.state import GPU_STATES, Reported, known, message_of, poll_seconds
from kybernate.agent.inventory.tiers import Tiers, Usage
from kybernate.agent.inventory.workload import workload_of
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as api
from kybernate.messages import containers_pb2
from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate.node.finding import HealthFinding
from kybernate.node.lookup import gpu_word
from kybernate_shim.config import Config
from kybernate_shim.gpu.errors import CudaUnavailable
from kybernate_shim.gpu.helper_answers import CudaInfo, NodeGpu
from kybernate_shim.messages import events_pb2, process_pb2, types_pb2
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.messages.any import pack
from kybernate_shim.task import gpu_states
from tests.unit.agent.test_hub import MemoryHistory

TOPIC = re.compile(r"(/[A-Za-z0-9]+([._-][A-Za-z0-9]+)*)+")  # what containerd accepts


def record(spec: Any = None, **labels: str) -> containers_pb2.Container:
    found = containers_pb2.Container(id="c", labels=labels)
    found.runtime.name = "io.containerd.kybernate.v1"
    found.spec.value = json.dumps(spec if spec is not None else {}).encode()
    return found


# -- containers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "labels", "expected"),
    [
        ("web-5d8f-x2x4z", {"pod-template-hash": "5d8f"}, "web"),
        ("db-0", {"statefulset.kubernetes.io/pod-name": "db-0", "controller-revision-hash": "db-77"}, "db"),
        ("agent-x2x4z", {"controller-revision-hash": "77"}, "agent"),
        ("train-abc", {"batch.kubernetes.io/job-name": "train"}, "train"),
        ("train-abc", {"job-name": "train", "kybernate.io/workload": "own"}, "own"),
        ("alone", {}, ""),
        ("cut", {"pod-template-hash": "5d8f"}, ""),
    ],
)
def test_workload_is_the_owner_of_the_pod(pod: str, labels: dict[str, str], expected: str) -> None:
    assert workload_of([{}, labels], pod, labels) == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}, "attached"),
        ({"annotations": {"cdi.k8s.io/gpu": "nvidia.com/gpu=0"}}, "attached"),
        ({"annotations": {"cdi.k8s.io/net": "example.com/net=0", "of": "nvidia.com/gpu=0"}}, ""),
        ({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}}, ""),
        ({"linux": {"devices": [{"path": "/dev/nvidia3"}]}}, "attached"),
        ({"linux": {"devices": [{"path": "/dev/null"}]}}, ""),
        ({"process": ["no", "spec"], "linux": {"devices": "none"}}, ""),
    ],
)
def test_gpu_state_is_empty_where_a_container_has_no_gpu(spec: Any, expected: str) -> None:
    one = known("default", record(spec), process_pb2.Process(pid=7, status="RUNNING"), {})
    assert gpu_word(message_of(one, Reported(wire.Container(gpu="attached"))).gpu) == expected
    assert message_of(one, Reported(wire.Container(gpu="suspended"))).gpu == api.Container.SUSPENDED


@pytest.mark.parametrize("said", ["", *gpu_states.STARTS])
def test_each_gpu_state_of_a_shim_keeps_its_word(said: str) -> None:
    assert gpu_word(GPU_STATES[said]) == said


@pytest.mark.parametrize("said", ["partly suspended", "hibernating", "SUSPENDED", "no_gpu", "\N{SNOWMAN}"])
def test_gpu_state_of_a_shim_of_another_release_is_other(said: str) -> None:
    one = known("default", record({}), None, {})
    assert gpu_word(message_of(one, Reported(wire.Container(gpu=said))).gpu) == "other"


NAMES = st.sampled_from(["process", "env", "linux", "devices", "path", "annotations", "x"])
SPECS = st.recursive(
    st.none() | st.booleans() | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
    max_leaves=10,
)


@given(SPECS)
def test_any_spec_is_read(spec: Any) -> None:
    message_of(known("default", record(spec), None, {}), Reported())


def test_image_that_was_restored_is_named() -> None:
    spec = {"annotations": {"kybernate.io/restore-from": "all", "kybernate.io/restore-from.main": "own"}}
    assert known("k8s.io", record(spec), None, {}).restored_from == "all"
    assert known("k8s.io", record(spec, **{"io.kubernetes.container.name": "main"}), None, {}).restored_from == "own"
    assert known("k8s.io", record(spec, **{"io.cri-containerd.kind": "sandbox"}), None, {}).restored_from == ""


def test_shims_word_on_the_image_counts_more_than_the_annotation() -> None:
    """A container that starts again is restored from a later image than its annotation names, or from none."""
    one = known("k8s.io", record({"annotations": {"kybernate.io/restore-from": "latest"}}), None, {})
    restored = wire.Container(restored_from="/var/lib/kybernate/checkpoints/team-a/newest")
    assert message_of(one, Reported(restored)).restored_from == "newest"
    assert message_of(one, Reported(wire.Container(restored_from=""))).restored_from == ""
    assert message_of(one, Reported(wire.Container())).restored_from == "latest"  # of an earlier release


def test_held_container_is_shown_as_such() -> None:
    task = process_pb2.Process(status=process_pb2.RUNNING)
    one = known("k8s.io", record({}), task, {})
    assert message_of(one, Reported(wire.Container(state="running"))).state == api.Container.RUNNING
    assert message_of(one, Reported(wire.Container(state="held"))).state == api.Container.HELD


def test_container_that_is_held_or_being_paused_has_not_ended() -> None:
    runs = api.Container(id="a", title="a", state=api.Container.RUNNING, pid=7)
    for state in (api.Container.HELD, api.Container.PAUSING):
        still = api.Container(id="a", title="a", state=state, pid=7)
        assert [*happenings(runs, still), *happenings(still, runs)] == []
    ended = api.Container(id="a", title="a", state=api.Container.STOPPED)
    held = api.Container(id="a", title="a", state=api.Container.HELD, pid=7)
    assert [one.type for one in happenings(held, ended)] == ["container.ended"]


def test_operation_is_its_name_or_its_verb() -> None:
    one = known("default", record(), process_pb2.Process(pid=7, status="RUNNING"), {})
    assert message_of(one, Reported(wire.Container(phase="suspend"))).operation == "suspend"
    assert message_of(one, Reported(wire.Container(phase="suspend", operation="op-1"))).operation == "op-1"


def test_only_what_works_or_does_not_answer_is_polled() -> None:
    assert poll_seconds(Reported(wire.Container()), 0) is None
    assert poll_seconds(Reported(foreign=True), 0) is None
    assert poll_seconds(Reported(wire.Container(phase="suspend")), 0) == 1
    assert poll_seconds(Reported(wire.Container(operation="waits")), 0) == 1
    assert [poll_seconds(Reported(problem="x"), failures) for failures in (0, 1, 9)] == [1, 2, 30]


# -- containerd's events -----------------------------------------------------------------------------------------------


def envelope(topic: str, event: Any) -> types_pb2.Envelope:
    return types_pb2.Envelope(namespace="n", topic=topic, event=pack(event))


def test_events_of_execs_are_about_no_container() -> None:
    exit_of_exec = events_pb2.TaskExit(container_id="c", id="e", pid=7)
    assert notice_of(envelope("/tasks/exit", exit_of_exec)) is None
    assert notice_of(envelope("/tasks/delete", events_pb2.TaskDelete(container_id="c", id="e", pid=7))) is None
    whole = events_pb2.TaskDelete(container_id="c", pid=7)
    assert notice_of(envelope("/tasks/delete", whole)) == Notice("n", "c", "/tasks/delete", 7)


@given(st.sampled_from(["/tasks/exit", "/tasks/delete", "/tasks/start", ENDED, "/containers/delete"]), st.binary())
def test_any_payload_is_a_notice_or_nothing(topic: str, payload: bytes) -> None:
    found = types_pb2.Envelope(namespace="n", topic=topic)
    found.event.value = payload
    notice_of(found)


# -- events to containerd ----------------------------------------------------------------------------------------------


@given(st.text(min_size=1).filter(lambda type: re.search("[A-Za-z0-9]", type)))
def test_topic_is_one_that_containerd_accepts(type: str) -> None:
    assert TOPIC.fullmatch(topic_of(type))


class Refusing:
    """containerd that is away, refuses, and then accepts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.got: list[str] = []

    async def forward(self, envelope: types_pb2.Envelope) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.got.append(envelope.topic)


def test_events_wait_for_containerd_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kybernate.agent.events.containerd.PAUSE_SECONDS", 0)

    async def run() -> None:
        containerd = Refusing(ContainerdUnreachable("away"), ContainerdRefused("no", code="INVALID_ARGUMENT"))
        sink = ContainerdSink(containerd, structlog.wrap_logger(structlog.testing.CapturingLogger()))
        for type in ("a.lost", "b.kept", "c.kept"):
            sink.offer(api.Event(type=type))
        task = asyncio.create_task(sink.run())
        async with asyncio.timeout(5):
            while len(containerd.got) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        task.cancel()
        assert containerd.got == ["/kybernate/events/b/kept", "/kybernate/events/c/kept"]

    asyncio.run(run())


def test_queue_for_containerd_is_bounded() -> None:
    async def run() -> None:
        capturing = structlog.testing.CapturingLogger()
        sink = ContainerdSink(Refusing(), structlog.wrap_logger(capturing))
        for number in range(QUEUE_LIMIT + 3):
            sink.offer(api.Event(type="a.happened", id=number))
        assert len(sink._queue) == QUEUE_LIMIT
        assert len(capturing.calls) == 3

    asyncio.run(run())


def test_event_travels_as_a_type_that_clients_of_containerd_know() -> None:
    event = api.Event(id=7, type="container.lost", level="error", message="x", container="c", namespace="k8s.io")
    event.fields["bytes"] = "9"
    found = envelope_of(event)
    assert (found.topic, found.namespace) == ("/kybernate/events/container/lost", "k8s.io")
    assert found.event.type_url == "containerd.events.ContainerUpdate"
    update = events_pb2.ContainerUpdate.FromString(found.event.value)
    assert (update.id, update.labels["message"], update.labels["bytes"]) == ("c", "x", "9")


# -- GPUs --------------------------------------------------------------------------------------------------------------


class Driver:
    def __init__(self) -> None:
        self.time = 100.0
        self.asked = 0
        self.answer: CudaInfo | CudaUnavailable = CudaInfo("580.1", 13000, (), ())

    async def ask(self) -> CudaInfo:
        self.asked += 1
        if isinstance(self.answer, CudaUnavailable):
            raise self.answer
        return self.answer


def test_driver_is_asked_once_a_second_and_rarely_without_one(tmp_path: Path) -> None:
    async def run() -> None:
        driver, used = Driver(), list[Users]()
        hub = Hub(MemoryHistory())
        gpus = Gpus(hub, dict, used.append, ask=driver.ask, now=lambda: driver.time, proc=tmp_path)
        driver.answer = CudaInfo("580.1", 13000, (NodeGpu("GPU-1", "H100", 80, 30, False, 0),), ())
        await asyncio.gather(gpus.refresh(), gpus.refresh())
        assert driver.asked == 1
        assert [(gpu.uuid, gpu.used_bytes) for gpu in hub.objects("gpu")] == [("GPU-1", 50)]
        driver.time += 1
        driver.answer = CudaUnavailable("no driver")
        await gpus.refresh()
        assert (driver.asked, hub.objects("gpu"), gpus.problem) == (2, [], "no driver")
        driver.time += 2
        await gpus.refresh()
        assert driver.asked == 2

    asyncio.run(run())


def test_gpus_of_containers_are_found_by_cgroups(tmp_path: Path) -> None:
    for pid, cgroup in {1: "/pod/a", 2: "/pod/a/inner", 3: "/pod/b", 4: "/elsewhere"}.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(f"0::{cgroup}\n1:name=systemd:/\n")

    async def run() -> None:
        driver, used = Driver(), list[Users]()
        pids = {("n", "a"): 1, ("n", "b"): 3, ("n", "gone"): 99}
        hub = Hub(MemoryHistory())
        gpus = Gpus(hub, lambda: pids, used.append, ask=driver.ask, proc=tmp_path)
        holdings = {2: 10, 3: 20, 4: 30, 98: 40}
        driver.answer = CudaInfo("580", 13000, (NodeGpu("GPU-1", "H100", 80, 30, False, 0, holdings),), ())
        await gpus.refresh()
        assert used == [{("n", "a"): ["GPU-1"], ("n", "b"): ["GPU-1"]}]
        (gpu,) = hub.objects("gpu")
        assert [(one.namespace, one.container, one.bytes) for one in gpu.shares] == [("n", "b", 20), ("n", "a", 10)]

    asyncio.run(run())


def test_activity_of_a_container_is_that_of_all_its_processes(tmp_path: Path) -> None:
    for pid, cgroup in {1: "/pod/a", 2: "/pod/a/inner", 3: "/pod/b"}.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")

    async def run() -> None:
        driver = Driver()
        gpus = Gpus(
            Hub(MemoryHistory()), lambda: {("n", "a"): 1, ("n", "b"): 3}, lambda _: None, ask=driver.ask, proc=tmp_path
        )
        uses = {1: 500, 2: 700, 99: 900}
        first = NodeGpu("GPU-1", "H100", 80, 30, False, 0, {1: 10, 2: 10, 3: 10}, computed=uses, sampled=900)
        split = NodeGpu("GPU-2", "H100", 80, 30, True, 1, {3: 10})
        driver.answer = CudaInfo("580", 13000, (first, split), ())
        assert await gpus.activity(("n", "a")) == Activity(700)
        assert await gpus.activity(("n", "b")) == Activity(0, ("GPU-2",))
        assert await gpus.activity(("n", "gone")) == Activity()
        driver.answer = CudaInfo("580", 13000, (replace(first, sampled=700), split), ())
        sight = await gpus.look()
        assert sight is not None
        assert sight.activities["n", "a"] == Activity(700, works=True)
        assert sight.processes == {("n", "a"): {1, 2}, ("n", "b"): {3}}

    asyncio.run(run())


@given(st.text(alphabet="/ab", max_size=20))
def test_any_cgroup_is_of_at_most_one_container(cgroup: str) -> None:
    assert container_of(cgroup, {"": ("n", "none"), "/": ("n", "root"), "/a": ("n", "a")}) in (None, ("n", "a"))


def test_cgroup_and_address_of_what_is_gone_are_empty(tmp_path: Path) -> None:
    assert cgroup_of(7, tmp_path) == ""
    assert pci_addresses(tmp_path) == {}
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "information").write_text("Model: \t H100\nGPU UUID: \t GPU-1\nno colon\n")
    assert pci_addresses(tmp_path) == {"GPU-1": "0000:1b:00.0"}


# -- places and node ---------------------------------------------------------------------------------------------------


def test_tiers_follow_the_configuration(tmp_path: Path) -> None:
    async def run() -> None:
        hub = Hub(MemoryHistory())
        root, trusted = tmp_path / "not" / "yet", tmp_path
        configs = [Config(checkpoint_root=root, trusted_roots=(trusted,)), Config(checkpoint_root=root)]
        tiers = Tiers(hub, lambda: configs[0], look=lambda config: {root: Usage(3, 700)})
        await tiers.refresh(images=True)
        first, second = hub.objects("tier")
        assert first.name in ("disk", "ram")
        assert (first.images, first.used_bytes, second.name) == (3, 700, str(trusted))
        assert 0 < first.free_bytes <= first.capacity_bytes
        configs.pop(0)
        await tiers.refresh()
        assert [tier.images for tier in hub.objects("tier")] == [3]

    asyncio.run(run())


def test_facts_have_versions_and_findings_while_containerd_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away() -> str:
        raise ContainerdUnreachable("away")

    monkeypatch.setattr(node_facts, "PROGRAMS", ("python3",))

    async def run() -> None:
        findings = [HealthFinding("CRIU", "bad", "missing", "install it"), HealthFinding("kernel", "note", "old")]
        facts = NodeFacts(away, Config, look=lambda: findings)
        await facts.refresh()
        assert [finding.level for finding in facts.current.findings] == ["error", "warning"]
        assert {"kybernate", "kernel"} <= facts.current.versions.keys()

    asyncio.run(run())


def test_memory_is_the_machines() -> None:
    memory = memory_message(Config())
    assert memory.total_bytes > memory.available_bytes > 0
