"""An image moves from one node's agent to another's, and its program continues there.

Both agents run on the one node of the lab. The second one and its commands have a mount namespace in which `shim.toml`
and `agent.toml` are others: it keeps its images elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kybernate.messages import agent_pb2 as wire
from kybernate.registry.catalogue import Catalogue
from kybernate.store.keys import make_key
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.run_directory import ARRIVING
from tests.system import node_agent
from tests.system.checkpoints import Witness, holding, kybernate
from tests.system.ctr import Ctr, eventually
from tests.system.node_agent import NodeAgent
from tests.unit.agent.access.authority import Authority

ROOT, OTHER = Path("/var/lib/kybernate/checkpoints"), Path("/var/lib/kybernate-two/checkpoints")
MIB = 64
ELSEWHERE = (
    'mount --bind "$0/two/shim.toml" /etc/kybernate/shim.toml && mount --bind "$0/two/agent.toml" '
    '/etc/kybernate/agent.toml && exec "$@"'
)


@dataclass
class Node(NodeAgent):
    """An agent with a name of its own and the registry that both nodes share."""

    name: str = "node-1"

    def write(self, settings: str = "") -> None:
        (self.place / "agent.toml").write_text(
            f'state_directory = "{self.place}/state"\nsocket = "{self.place}/run/agent.sock"\n'
            f'node_name = "{self.name}"\nregistry = "sqlite:///{self.place.parent}/registry.db"\n{self.settings}'
        )


@dataclass
class Two:
    """Both nodes: the first one has images, the second one has none."""

    place: Path
    one: Node
    two: Node
    ca: Authority

    def there(self, *words: str) -> list[str]:
        """Return the command line that runs a program as on the second node."""
        return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", ELSEWHERE, str(self.place), *words]

    def asked(self, *words: str, fails: bool = False) -> str:
        """Run `kybernate` on the second node."""
        environment = os.environ | {"KYBERNATE_AGENT": self.two.address.removeprefix("unix:")}
        command = self.there("/opt/kybernate/bin/kybernate", *words)
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert (found.returncode != 0) == fails, found.stdout + found.stderr
        return found.stdout + found.stderr


@pytest.fixture
def both(shim_config: Path) -> Iterator[Two]:
    ca = Authority()
    own = Path("/etc/kybernate/agent.toml")
    with node_agent.short_place() as place:
        key = place / "shared.key"
        key.touch(mode=0o600)
        key.write_text(os.urandom(32).hex())
        shim_config.write_text(f'shared_key = "{key}"\n')
        own.touch()
        nodes = []
        for name in ("one", "two"):
            (place / name).mkdir()
            ca.write(place / name, f"node-{len(nodes) + 1}", "localhost")
            tls = f'certificate = "{place}/{name}/certificate"\nkey = "{place}/{name}/key"\n'
            listen = 'listen = "127.0.0.1:7443"\npeers = ["node-*"]\n' if not nodes else ""
            peers = '[peers]\naddresses = { node-1 = "localhost:7443" }\n'
            settings = f'[tls]\n{tls}client_ca = "{place}/{name}/client_ca"\n{listen}{peers}'
            nodes.append(Node(place / name, settings, name=f"node-{len(nodes) + 1}"))
            nodes[-1].write()
        (place / "two/shim.toml").write_text(f'checkpoint_root = "{OTHER}"\nshared_key = "{key}"\n')
        found = Two(place, *nodes, ca)
        try:
            subprocess.run(["mount", "--make-shared", "/run"], check=True)  # as on a node with systemd
            found.one.start()
            found.one.wait_ready()
            found.two.start(found.there())
            found.two.wait_ready()
            yield found
        finally:
            for node in nodes:
                if node.process is not None and node.process.poll() is None:
                    node.process.kill()
                    node.process.wait(20)
                print(node.log.read_text()[-4000:])
            subprocess.run(["mount", "--make-private", "/run"], check=True)
            own.unlink()
            shutil.rmtree(OTHER.parent, ignore_errors=True)


@pytest.fixture
def image(both: Two, ours: Ctr, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of an image that the first node has, and whose container has ended."""
    monkeypatch.setenv("KYBERNATE_AGENT", both.one.address.removeprefix("unix:"))
    with holding(ours, MIB) as witness:
        name = f"peer-{witness.id}"
        kybernate("checkpoint", witness.id, name, "--exit")
    eventually(lambda: both.one.registered(name))
    yield name
    shutil.rmtree(ROOT / name, ignore_errors=True)


def continues(ours: Ctr, image: Path, log: Path) -> None:
    """Restore an image: its program counts."""
    new = ours.new_id("there")
    try:
        kybernate("restore", str(image), "--name", new, "--detach", "--log", str(log))
        eventually(lambda: Witness(new, log).count() > 2)
    finally:
        ours.remove(new)


def test_image_moves_and_its_program_continues(both: Two, image: str, ours: Ctr, tmp_path: Path) -> None:
    id = read_image(ROOT / image).manifest.id
    moved = json.loads(both.asked("promote", image, "--to", "disk", "--json"))
    assert (moved["result"]["image_id"], moved["result"]["path"]) == (id, str(OTHER / image))
    assert not verify(OTHER / image)

    def known() -> bool:
        replicas = both.one.call("Checkpoints", "GetImage", wire.GetImageRequest(image=id)).replicas
        return {replica.node for replica in replicas} == {"node-1", "node-2"}

    eventually(known)
    continues(ours, OTHER / image, tmp_path / "log")
    got = json.loads(both.asked("store", "get", image, str(tmp_path / "again"), "--from-node", "node-1", "--json"))
    assert got["id"] == id
    assert not verify(tmp_path / "again")


def test_image_arrives_although_its_agent_is_killed(both: Two, image: str, ours: Ctr, tmp_path: Path) -> None:
    both.one.settings += "bytes_per_second = 20000000\n"
    both.one.stop(signal.SIGKILL)
    both.one.start()
    both.one.wait_ready()
    operation = both.asked("promote", image, "--to", "disk", "--no-wait").strip()
    eventually(lambda: both.two.get(operation).progress.done_bytes > MIB << 18)
    both.one.stop(signal.SIGKILL)
    both.one.settings = both.one.settings.replace("bytes_per_second = 20000000\n", "")
    both.one.start()
    both.two.done(operation)
    assert not verify(OTHER / image)
    continues(ours, OTHER / image, tmp_path / "log")


def test_image_of_a_peer_is_restored_while_it_arrives(both: Two, image: str, ours: Ctr, tmp_path: Path) -> None:
    with Catalogue(f"sqlite:///{both.place}/registry.db", node="node-2") as catalogue:
        # The second agent hears of the image, by the containerd that both have, and finds its directory.
        eventually(lambda: {one.node for one in catalogue.get(image).replicas} == {"node-1", "node-2"})
        catalogue.drop_replica(str(ROOT / image))
    new, log = ours.new_id("there"), tmp_path / "log"
    try:
        said = both.asked("restore", image, "--name", new, "--detach", "--log", str(log), "--json")
        eventually(lambda: Witness(new, log).count() > 2)
    finally:
        ours.remove(new)
    answer = json.loads(said)
    assert answer["source"] == "peer node-1"
    assert {step["name"] for step in answer["steps"]} >= {"receive", "restore"}
    assert not (OTHER / image).exists()
    assert not ARRIVING.exists()


@pytest.fixture
def stored(both: Two, image: str) -> str:
    """Return the URL of a store that has the image, too, and that the second node uses."""
    url = f"file://{both.place}/store"
    make_key(both.place / "store.key")
    settings = f'[store]\nurl = "{url}"\nkey = "{both.place}/store.key"\n'
    own = Path("/etc/kybernate/agent.toml")
    own.write_text(settings)
    kybernate("store", "init")
    kybernate("store", "put", str(ROOT / image))
    own.write_text("")
    both.two.stop()
    both.two.settings += settings
    both.two.start(both.there())
    both.two.wait_ready()
    return url


def test_restore_goes_on_with_the_store_when_its_node_fails(
    both: Two, image: str, stored: str, ours: Ctr, tmp_path: Path
) -> None:
    both.one.stop()
    both.one.settings += "bytes_per_second = 20000000\n"
    both.one.start()
    both.one.wait_ready()
    with Catalogue(f"sqlite:///{both.place}/registry.db", node="node-2") as catalogue:
        eventually(lambda: {one.node for one in catalogue.get(image).replicas} >= {"node-1", "node-2"})
        catalogue.drop_replica(str(ROOT / image))
    new, log = ours.new_id("there"), tmp_path / "log"
    try:
        request = wire.RestoreRequest(image=image, name=new, log_path=str(log))
        begun = both.two.call("Operations", "Restore", request)
        both.two.until(begun.id, lambda one: one.progress.done_bytes > MIB << 18)
        both.one.stop(signal.SIGKILL)
        shutil.rmtree(ROOT / image)
        both.one.start()
        done = both.two.done(begun.id)
        assert done.result.source == f"peer node-1, then disk {stored}"
        eventually(lambda: Witness(new, log).count() > 2)
    finally:
        ours.remove(new)


def test_image_goes_to_peers_alone(both: Two, image: str) -> None:
    get = ("store", "get", image, "--from-node", "node-1")
    key = both.place / "two/key"
    for ca, name, words in (
        (both.ca, "reader-1", "may not call OpenImage"),
        (Authority("another"), "node-2", "no agent answers"),
    ):
        ca.write(both.place / "two", name)
        (both.place / "two/client_ca").write_bytes(both.ca.certificate)
        assert words in both.asked(*get, fails=True)
    key.unlink()
    assert "cannot be read" in both.asked(*get, fails=True)
    assert not list(OTHER.rglob("*.img"))
