"""A pod names an image that only the object store has: the agent brings it, from the pod's own namespace alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.run_directory import IMAGES_SOCKET
from tests.hostile.tenant import Tenant
from tests.system import node_agent
from tests.system.checkpoints import COUNT, kybernate
from tests.system.ctr import eventually
from tests.system.node_agent import NodeAgent
from tests.system.tenants import ROOT, pods_place

FROM = "kybernate.io/restore-from"
AGENT = Path("/etc/kybernate/agent.toml")
KILLED = """
import os, signal, sys
from pathlib import Path
from kybernate_shim.vram_io.arrival import Description, begin
place = Path(sys.argv[1])
place.mkdir(parents=True)
begin(place, Description({}))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[str]:
    """Settings with a store, which commands have as well."""
    text = f'[store]\nurl = "file://{tmp_path}/store"\nkey = "{tmp_path}/store.key"\n'
    AGENT.parent.mkdir(exist_ok=True)
    AGENT.write_text(text)
    kybernate("store", "init")
    yield text
    AGENT.unlink()


@pytest.fixture
def image(tenant: Tenant, settings: str) -> Iterator[str]:
    """Return the name of an image of tenant-a's pod, which the store alone has."""
    with pods_place("tenant-a") as place:
        pod = tenant.pod()
        tenant.cri.run(pod, "c", COUNT)
        tenant.cri.await_log(pod, "c", "3")
        kybernate("checkpoint", f"tenant-a/{pod.config.metadata.name}", str(place), "--exit")
        kybernate("store", "put", str(place))
        shutil.rmtree(place)
        yield place.name


@pytest.fixture
def agent(settings: str) -> Iterator[NodeAgent]:
    """An agent whose socket for shims is where they look for it."""
    with node_agent.short_place() as place, node_agent.running(place, settings) as one:
        IMAGES_SOCKET.symlink_to(place / "run" / IMAGES_SOCKET.name)
        yield one
        IMAGES_SOCKET.unlink()


def test_pod_continues_from_an_image_of_the_store(
    tenant: Tenant, other_tenant: Tenant, image: str, agent: NodeAgent
) -> None:
    assert "no such directory" in other_tenant.refused(other_tenant.pod(), "c", annotations={FROM: image})
    said = other_tenant.refused(other_tenant.pod(), "c", annotations={FROM: f"../tenant-a/{image}"})
    assert "is not the name of an image" in said
    assert [line["namespace"] for line in agent.lines("image.wanted")] == ["tenant-b"]
    assert not (ROOT / "tenant-b" / image).exists()
    assert not (ROOT / "tenant-a" / image).exists()

    pod = tenant.pod(annotations={FROM: image})
    tenant.cri.run(pod, "c", COUNT, annotations={FROM: image})
    log = eventually(lambda: tenant.cri.log(pod, "c"))
    assert int(log[0].split()[-1]) > 3, "it began again"
    eventually(lambda: agent.lines("image.fetched"))
    assert "verified" in kybernate("inspect", str(ROOT / "tenant-a" / image), "--verify")


def test_image_that_is_not_this_nodes_is_not_brought(tenant: Tenant, image: str, agent: NodeAgent) -> None:
    """It was changed in the store, or is another tenant's under this one's name."""
    place = ROOT / "tenant-a" / image
    kybernate("store", "get", image, str(place))
    manifest = json.loads((place / NAME).read_text())
    for change, words in (
        ({"id": "forged"}, "the manifest was changed after it was signed"),
        ({"id": "foreign", "source": {**manifest["source"], "namespace": "tenant-b"}}, "no such directory"),
    ):
        (place / NAME).write_text(json.dumps({**manifest, **change}))
        kybernate("store", "rm", image if change["id"] == "forged" else "forged")
        kybernate("store", "put", str(place))
        kept = place.rename(ROOT.parent / "kept")
        said = tenant.refused(tenant.pod(), "c", annotations={FROM: image})
        assert words in said
        assert not place.exists()
        kept.rename(place)


def test_disk_that_would_be_too_full_stays_as_it_is(tenant: Tenant, image: str, agent: NodeAgent) -> None:
    agent.stop()
    agent.settings += f"[tiers.disk]\nquota = {1 << 10}\n"
    agent.start()
    agent.wait_ready()
    said = tenant.refused(tenant.pod(), "c", annotations={FROM: image})
    assert "would fill tier disk above 90%" in said
    assert not (ROOT / "tenant-a" / image).exists()


def test_agent_that_is_killed_leaves_nothing(tenant: Tenant, image: str, agent: NodeAgent) -> None:
    """Without an agent the pod is refused as before; the next agent removes what the killed one has left."""
    place = ROOT / "tenant-a" / image
    agent.stop()
    assert "no such directory" in tenant.refused(tenant.pod(), "c", annotations={FROM: image})
    subprocess.run(["/opt/kybernate/bin/python", "-c", KILLED, str(place)], check=False)
    assert place.exists()
    agent.start()
    agent.wait_ready()
    assert not place.exists()
