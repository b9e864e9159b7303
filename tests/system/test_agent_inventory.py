"""The agent's inventory against real containerd and shims: it equals what they say, and a watcher misses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kybernate.messages import agent_pb2 as api
from kybernate.node.lookup import task_word
from tests.fakes.cuda import Gpus
from tests.lab.node import Containerd
from tests.system import gpu
from tests.system.checkpoints import kill as kill_process
from tests.system.checkpoints import kybernate, shim_of
from tests.system.ctr import STOCK, Ctr, Events, eventually
from tests.system.watcher import SmallAgent, Watcher, small_agent, watching

NO_FIFOS = ["--null-io"]  # ctr removes its FIFOs with the task; containerd, which removes it here, knows none of them


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[SmallAgent]:
    with small_agent(tmp_path) as there:
        yield there
    gpu.forget_helper()  # the doctor has asked it


@pytest.fixture
def watcher(agent: SmallAgent) -> Iterator[Watcher]:
    with watching(agent) as there:
        yield there


def said_by_ctr(ctr: Ctr) -> dict[str, tuple[str, int]]:
    """Return state and pid of every container of the namespace; of one without a task, nothing and 0."""
    tasks = {id: (state.lower(), pid) for id, (pid, state) in ctr.tasks().items()}
    return {id: tasks.get(id, ("", 0)) for id in ctr("container", "ls", "-q").split()}


def agree(ctr: Ctr, agent: SmallAgent, watcher: Watcher) -> bool:
    """Compare ctr, the agent's list and the watcher's objects."""
    listed = {one.id: one for one in agent.containers() if one.namespace == ctr.namespace}
    followed = {one.id: one for (kind, _), one in list(watcher.objects.items()) if kind == "container"}
    found = {id: (task_word(one.state), one.pid) for id, one in listed.items()}
    return followed == listed and found == said_by_ctr(ctr)


def assert_whole(watcher: Watcher) -> None:
    """Every event was seen once, in order, from the first on."""
    assert [event.id for event in watcher.events] == list(range(1, len(watcher.events) + 1))


def test_life_of_containers_is_followed(ours: Ctr, agent: SmallAgent, watcher: Watcher) -> None:
    # Not one long sleep: CRIU interrupts it.
    naps = "while :; do sleep 0.1; done"
    with ours.running("sh", "-c", naps, flags=["--label", "kybernate.io/workload=counter"]) as id:
        eventually(lambda: watcher.states(id) == ("running", ""))
        assert watcher.container(id).workload == "counter"
        assert watcher.container(id).started.seconds
        ours("task", "pause", id)
        eventually(lambda: watcher.states(id)[0] == "paused")
        ours("task", "resume", id)
        eventually(lambda: watcher.states(id)[0] == "running")
        lived = ["created", "started", "paused", "unpaused"]
        eventually(lambda: watcher.types(id) == [f"container.{word}" for word in lived])
        name = ours("task", "checkpoint", id).strip()  # which pauses it, too
        eventually(lambda: "container.checkpointed" in watcher.types(id))
        ours("images", "rm", "--sync", name)
        assert ours.status(id) == "RUNNING"
        ours("task", "kill", "-s", "SIGKILL", id)
        eventually(lambda: watcher.states(id)[0] == "stopped")
        eventually(lambda: agree(ours, agent, watcher))
    eventually(lambda: not watcher.container(id).id)
    eventually(lambda: watcher.types(id)[-1] == "container.removed")
    freezes = ("container.paused", "container.unpaused")
    lived = [
        "container.created", "container.started", "checkpoint.started", "container.checkpointed", "container.ended",
        "container.removed",
    ]  # fmt: skip
    assert [type for type in watcher.types(id) if type not in freezes] == lived
    eventually(lambda: agree(ours, agent, watcher))
    assert_whole(watcher)


def test_containers_of_other_shims_are_foreign(agent: SmallAgent, watcher: Watcher, ours: Ctr) -> None:
    stock = Ctr(runtime=STOCK)
    with stock.running("sleep", "1000") as id, ours.running("sleep", "1000") as mine:
        eventually(lambda: watcher.states(id)[0] == "running")
        eventually(lambda: watcher.states(mine)[0] == "running")
        assert watcher.container(id).foreign
        assert not watcher.container(mine).foreign
        listed = agent.call("ListContainers", api.ListContainersRequest()).containers
        assert [one.id for one in listed] == [mine]


def test_what_happens_while_containerd_is_away_is_found(
    ours: Ctr, agent: SmallAgent, watcher: Watcher, containerd: Containerd
) -> None:
    with ours.running("sleep", "1000") as stays, ours.running("sleep", "1000", flags=NO_FIFOS) as ends:
        eventually(lambda: watcher.states(stays)[0] == watcher.states(ends)[0] == "running")
        pid = ours.pid(ends)
        containerd.kill()
        eventually(lambda: any(event.type == "containerd.lost" for event in watcher.events))
        psutil.Process(pid).kill()
        containerd.start()
        containerd.wait_ready()
        eventually(lambda: watcher.states(ends)[0] != "running")
        eventually(lambda: any(event.type == "containerd.found" for event in watcher.events))
        with ours.running("sleep", "1000") as later:
            eventually(lambda: watcher.states(later)[0] == "running")
            eventually(lambda: agree(ours, agent, watcher))
        assert watcher.types(stays) == ["container.created", "container.started"]
        assert "container.ended" in watcher.types(ends)
        assert_whole(watcher)


def test_watcher_misses_nothing_over_restarts_of_the_agent(ours: Ctr, agent: SmallAgent, watcher: Watcher) -> None:
    with ours.running("sleep", "1000") as stays, ours.running("sleep", "1000") as goes:
        eventually(lambda: watcher.states(goes)[0] == "running")
        for round in range(3):
            agent.kill()
            ours("task", "resume" if round % 2 else "pause", stays)
            agent.start()
            wanted = "running" if round % 2 else "paused"
            eventually(lambda: watcher.states(stays)[0] == wanted)  # noqa: B023  # asked immediately
        agent.kill()
        ours.remove(goes)
        agent.start()
        eventually(lambda: watcher.snapshots == 5)
        eventually(lambda: agree(ours, agent, watcher))
        assert not watcher.container(goes).id
        eventually(lambda: [event.type for event in watcher.events].count("agent.started") == 5)
        assert_whole(watcher)


def test_dead_shim_is_noticed(ours: Ctr, agent: SmallAgent, watcher: Watcher) -> None:
    with ours.running("sleep", "1000", flags=NO_FIFOS) as id:
        eventually(lambda: watcher.states(id)[0] == "running")
        kill_process(shim_of(ours, id))
        eventually(lambda: watcher.states(id)[0] != "running")
        eventually(lambda: agree(ours, agent, watcher))


def test_events_reach_containerd_and_leave_its_clients_alive(ours: Ctr, events: Events, agent: SmallAgent) -> None:
    with ours.running("sleep", "1000") as id:  # not one that may have ended before the agent has looked
        eventually(lambda: _labels(events, "/kybernate/events/container/started", id))
    labels = eventually(lambda: _labels(events, "/kybernate/events/container/removed", id))
    assert labels["type"] == "container.removed"
    assert id in labels["message"]


def _labels(events: Events, topic: str, id: str) -> dict[str, str]:
    found = [event for name, event in list(events.seen) if name == topic and event.get("id") == id]
    return dict(found[0]["labels"]) if found else {}


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    yield gpu.install_driver()
    gpu.forget_helper()
    gpu.remove_driver()


def test_gpu_state_changed_behind_the_agents_back_is_noticed(
    gpus: Gpus, ours: Ctr, agent: SmallAgent, watcher: Watcher
) -> None:
    with gpu.computing(ours) as container:
        id = container.id
        eventually(lambda: watcher.states(id)[0] == "running")
        eventually(lambda: list(watcher.container(id).gpu_uuids))
        assert watcher.states(id) == ("running", "attached")
        uuid = watcher.container(id).gpu_uuids[0]
        eventually(lambda: watcher.objects["gpu", uuid].used_bytes > 0)
        suspended = json.loads(kybernate("suspend", id, "--json"))
        eventually(lambda: watcher.states(id) == ("running", "suspended"))
        assert watcher.container(id).vram_bytes == suspended["vram_bytes"] > 0
        assert list(watcher.container(id).gpu_uuids) == [uuid]
        eventually(lambda: watcher.objects["gpu", uuid].used_bytes == 0)
        kybernate("resume", id)
        eventually(lambda: watcher.states(id) == ("running", "attached"))
        eventually(lambda: agree(ours, agent, watcher))
        eventually(lambda: watcher.types(id)[2:] == ["container.suspended", "container.resumed"])
    node = agent.call("GetNode", api.GetNodeRequest())
    assert [found.uuid for found in node.gpus] == [found.uuid for found in sorted(node.gpus, key=lambda one: one.index)]
    assert len(node.gpus) == 2
    assert {"kybernate", "kernel", "criu", "runc", "containerd", "driver"} <= node.versions.keys()
    assert node.memory.total_bytes > node.memory.available_bytes > 0
    assert node.tiers[0].name in ("disk", "ram")
