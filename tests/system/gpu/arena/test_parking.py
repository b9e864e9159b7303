"""A container that is suspended for long is parked: dumped from memory to the disk, ended, and restored by a resume."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.messages import agent_pb2 as wire
from kybernate_shim.arena.memory import Memory
from kybernate_shim.checkpoint.image.verification import verify
from tests.fakes.cuda import Gpus
from tests.system import gpu, node_agent
from tests.system.checkpoints import kybernate
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.arena import MIB, SIZE, WANTED, in_arena
from tests.system.gpu.pods import pod_container, steps_of
from tests.system.node_agent import NodeAgent

PARKED = "kybernate.io/parked"
POLICY = "[tiers.policy]\npark_after = 2\ninterval = 1\n"


@pytest.fixture
def agent() -> Iterator[NodeAgent]:
    with node_agent.short_place() as place, node_agent.running(place, POLICY) as one:
        os.environ["KYBERNATE_AGENT"] = one.address.removeprefix("unix:")
        yield one
        del os.environ["KYBERNATE_AGENT"]


def parked(agent: NodeAgent, id: str) -> Path | None:
    """Return the directory of a parked container's image, None while there is none."""
    request = wire.ListImagesRequest(labels={PARKED: id})
    found = agent.call("Checkpoints", "ListImages", request).images
    return Path(found[0].replicas[0].place) if found else None


def test_suspended_container_is_parked_and_a_resume_restores_it(
    ctr: Ctr, gpus: Gpus, agent: NodeAgent, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED, log=log) as container:
        kybernate("suspend", container.id)
        used = gpus.used()
        assert in_arena(ctr, container.id) == MIB << 20
        eventually(lambda: agent.lines("policy.submitted"), seconds=90)
        while ctr.status(container.id) == "RUNNING":
            assert gpus.used() == used  # its GPU may be another container's by now
        image = eventually(lambda: parked(agent, container.id))
        assert image is not None
        assert not verify(image)
        assert Memory(SIZE).free() == SIZE

        kybernate("resume", container.id)
        assert ctr.status(container.id) == "RUNNING"
        container.computes_on()  # into the same file, and from the very step that it had come to
        request = wire.ListImagesRequest(labels={PARKED: container.id})
        eventually(lambda: not agent.call("Checkpoints", "ListImages", request).images)
        assert image.is_dir()
        shutil.rmtree(image)


def test_container_of_a_pod_is_parked_with_its_processes(cri: Cri, gpus: Gpus, agent: NodeAgent) -> None:
    with cri.pod(annotations={"kybernate.io/arena": "true"}) as pod:
        id = pod_container(cri, pod, gpu.command(mib=MIB))
        eventually(lambda: len(steps_of(cri, pod)) > 3, seconds=40)
        kybernate("suspend", pod.config.metadata.name)
        assert Memory(SIZE).free() < SIZE
        eventually(lambda: Memory(SIZE).free() == SIZE, seconds=90)
        last = steps_of(cri, pod)
        assert cri.state(id) == "CONTAINER_RUNNING"
        assert parked(agent, id) is None  # there is no image
        events = eventually(lambda: [one for one in agent.lines("operation.succeeded") if one["field_verb"] == "park"])
        assert len(events) == 1
        kybernate("wake", pod.config.metadata.name)
        eventually(lambda: steps_of(cri, pod)[-1] > last[-1] + 3)
