"""The agent restores from S3 while the image arrives: as an operation that a crash of the agent does not end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.messages import agent_pb2 as wire
from tests.contract.store.servers import BUCKET
from tests.fakes.cuda import Gpus
from tests.system import node_agent
from tests.system.checkpoints import kybernate, refused
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.arriving import (
    AGENT,
    IMAGES,
    MEMORY,
    MIB,
    Store,
    assert_nothing_is_left,
    command,
    put,
    restored,
    waiting,
)
from tests.system.node_agent import NodeAgent


@pytest.fixture
def agent(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgent]:
    with node_agent.short_place() as place, node_agent.running(place, AGENT.read_text()) as one:
        monkeypatch.setenv("KYBERNATE_AGENT", one.address.removeprefix("unix:"))
        yield one


@pytest.fixture
def stored(agent: NodeAgent, ctr: Ctr, name: str, tmp_path: Path) -> Path:
    """Return the log of a container whose image is in the store alone."""
    log = tmp_path / "log"
    put(ctr, name, log)
    return log


def begin(agent: NodeAgent, name: str, id: str, log: Path, key: str = "") -> wire.Operation:
    options = wire.Options(idempotency_key=key)
    return agent.operation("Restore", wire.RestoreRequest(image=name, name=id, log_path=str(log), options=options))


def last_use(agent: NodeAgent, name: str) -> float:
    """Return when the image was used last, as the registry has it."""
    image = agent.call("Checkpoints", "GetImage", wire.GetImageRequest(image=name))
    return float(image.last_used.ToSeconds())


def start(agent: NodeAgent) -> None:
    agent.start()
    agent.wait_ready()


def test_restore_from_the_store_is_an_operation(
    ctr: Ctr, gpus: Gpus, agent: NodeAgent, stored: Path, name: str
) -> None:
    id = ctr.new_id("gpu")
    with restored(ctr, id, stored) as container:
        answer = json.loads(kybernate(*command(name, id, stored)[1:]))
        container.computes_on()
        assert answer["source"] == f"object s3://{BUCKET}/node"
        steps = {step["name"]: step for step in answer["steps"]}
        assert {"receive", "restore", "vram-load", "cuda-restore", "arrival"} <= steps.keys()
        assert steps["arrival"]["bytes"] >= MIB << 20
        (done,) = agent.call("Operations", "ListOperations", wire.ListOperationsRequest(container=id)).operations
        assert (done.state, done.verb, done.result.source) == (wire.SUCCEEDED, "restore", answer["source"])
        eventually(lambda: last_use(agent, name))
    assert not MEMORY.exists()
    assert not (IMAGES / name).exists()
    said = refused("kybernate", "restore", "--from", "store", "nothing", "--detach")
    assert "the object store has no image nothing" in said


def test_repeated_request_is_the_same_operation_and_cancelling_it_leaves_nothing(
    ctr: Ctr, gpus: Gpus, store: Store, agent: NodeAgent, stored: Path, name: str
) -> None:
    id, before = ctr.new_id("gpu"), stored.read_text()
    store.slowed.hold(store.last_pack())
    begun = begin(agent, name, id, stored, "key")
    assert begin(agent, name, id, stored, "key").id == begun.id
    eventually(lambda: waiting(id), seconds=60)
    shown = agent.until(begun.id, lambda one: one.progress.step == "arrival")
    assert 0 < shown.progress.done_bytes < shown.progress.total_bytes
    agent.operation("CancelOperation", wire.CancelOperationRequest(id=begun.id))
    assert agent.ended(begun.id).state == wire.CANCELLED
    store.slowed.release()
    assert_nothing_is_left(gpus, id, stored, before)


def test_restore_outlives_the_agent(
    ctr: Ctr, gpus: Gpus, store: Store, agent: NodeAgent, stored: Path, name: str
) -> None:
    """Killed before there is a container, and while a shim waits for VRAM: the next agent begins again."""
    id, before = ctr.new_id("gpu"), stored.read_text()
    with restored(ctr, id, stored) as container:
        store.slowed.hold("packs/")
        begun = begin(agent, name, id, stored)
        agent.until(begun.id, lambda one: one.progress.step == "receive")
        eventually(lambda: list(MEMORY.glob("image-*/*")))
        agent.stop(signal.SIGKILL)
        store.slowed.release()
        store.slowed.hold(store.last_pack())
        start(agent)
        eventually(lambda: waiting(id), seconds=60)
        agent.stop(signal.SIGKILL)
        assert stored.read_text() == before
        store.slowed.release()
        start(agent)
        done = agent.done(begun.id)
        container.computes_on()
        assert done.result.source == f"object s3://{BUCKET}/node"
        assert len(agent.lines("operation.recovered")) == 2
        assert len(agent.lines("operation.succeeded")) == 2  # the checkpoint's, and this one
    eventually(lambda: not MEMORY.exists())
