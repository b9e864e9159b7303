"""Images move between memory, disk and an S3 server, and a restore finds them wherever they are whole."""

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
from kybernate.store.keys import make_key
from kybernate_shim.checkpoint.image.manifest import NAME as MANIFEST
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.run_directory import IMAGES_SOCKET
from tests.contract.store.servers import ACCESS, BUCKET, SECRET, Server, usual
from tests.system import node_agent
from tests.system.checkpoints import Witness, counting, holding, kybernate, refused
from tests.system.cri import Cri, Pod
from tests.system.ctr import CommandFailed, Ctr, eventually
from tests.system.node_agent import NodeAgent
from tests.system.tenants import pods_place

MEMORY = Path("/dev/shm/kybernate-test")
ROOT = Path("/var/lib/kybernate/checkpoints")
OTHER = Path("/var/lib/kybernate-two/checkpoints")  # of a second node
MIB = 64


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with usual(tmp_path / "server") as found:
        yield found


@pytest.fixture
def memory(shim_config: Path) -> Iterator[Path]:
    shim_config.write_text(f'memory_root = "{MEMORY}"\n')
    yield MEMORY
    shutil.rmtree(MEMORY, ignore_errors=True)


@pytest.fixture
def agent(memory: Path, server: Server, tmp_path: Path) -> Iterator[NodeAgent]:
    key = tmp_path / "store.key"
    make_key(key)
    settings = f'[store]\nurl = "s3://{BUCKET}/images"\nendpoint = "{server.endpoint}"\nkey = "{key}"\n'
    credentials = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
    with node_agent.short_place() as place:
        one = NodeAgent(place, settings, environment=credentials)
        one.write(settings)
        os.environ |= {"KYBERNATE_AGENT": one.address.removeprefix("unix:"), **credentials}
        try:
            init = ["--url", f"s3://{BUCKET}/images"]
            (Path("/etc/kybernate") / "agent.toml").write_text(settings)
            kybernate("store", "init", *init)
            one.start()
            one.wait_ready()
            yield one
        finally:
            (Path("/etc/kybernate") / "agent.toml").unlink(missing_ok=True)
            for name in ("KYBERNATE_AGENT", *credentials):
                os.environ.pop(name, None)
            if one.process is not None and one.process.poll() is None:
                one.process.kill()
                one.process.wait(20)
            print(one.log.read_text()[-6000:] if one.log.exists() else "")


@pytest.fixture
def image(agent: NodeAgent, ours: Ctr) -> Iterator[str]:
    """Return the name of an image that is on the disk alone; its container has ended."""
    with holding(ours, MIB) as witness:
        name = f"tiers-{witness.id}"
        kybernate("checkpoint", witness.id, name, "--exit")
    eventually(lambda: agent.registered(name))
    yield name
    for root in (ROOT, MEMORY):
        shutil.rmtree(root / name, ignore_errors=True)


@dataclass
class Second:
    """A second node over the same store: an agent, and commands, that keep images and registry elsewhere."""

    agent: NodeAgent

    def there(self, *words: str) -> list[str]:
        place = self.agent.place
        script = f'mount --bind {place}/shim.toml /etc/kybernate/shim.toml && exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "second", *words]

    def asked(self, *words: str) -> str:
        """Run `kybernate` there."""
        environment = os.environ | {"KYBERNATE_AGENT": self.agent.address.removeprefix("unix:")}
        return subprocess.run(
            self.there("/opt/kybernate/bin/kybernate", *words),
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout


@pytest.fixture
def second(agent: NodeAgent) -> Iterator[Second]:
    """A node that is started by its test."""
    place = agent.place / "two"
    place.mkdir()
    (place / "shim.toml").write_text(f'checkpoint_root = "{OTHER}"\n')
    two = Second(NodeAgent(place, f"{agent.settings}look_seconds = 1\n", environment=agent.environment, name="second"))
    try:
        yield two
    finally:
        if two.agent.process is not None:
            two.agent.stop(signal.SIGKILL)
            print(two.agent.log.read_text()[-4000:])
        shutil.rmtree(OTHER.parent, ignore_errors=True)


def tiers_of(agent: NodeAgent, image: str) -> set[str]:
    found = agent.call("Checkpoints", "GetImage", wire.GetImageRequest(image=image))
    return {replica.tier for replica in found.replicas}


def goes_on(ours: Ctr, image: str, tmp_path: Path) -> None:
    """Restore an image by its name: its program counts."""
    new, log = ours.new_id("back"), tmp_path / f"log-{os.urandom(4).hex()}"
    try:
        kybernate("restore", image, "--name", new, "--detach", "--log", str(log))
        eventually(lambda: Witness(new, log).count() > 2)
    finally:
        ours.remove(new)


def damage(directory: Path) -> None:
    largest = max(directory.glob("pages-*.img"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as stream:
        stream.seek(largest.stat().st_size // 2)
        stream.write(os.urandom(64))


def test_image_goes_through_all_tiers_and_is_restored_from_each(
    agent: NodeAgent, image: str, ours: Ctr, tmp_path: Path
) -> None:
    agent.write(agent.settings + "[tiers.policy]\nenabled = false\n")  # or it would copy the image where this has not
    told = json.loads(kybernate("promote", image, "--json"))
    assert told["result"]["path"] == str(MEMORY / image)
    eventually(lambda: tiers_of(agent, image) == {"ram", "disk"})
    assert not verify(MEMORY / image)

    damage(ROOT / image)  # the copy in memory is what is read
    goes_on(ours, image, tmp_path)
    with pytest.raises(CommandFailed, match="no other tier has a good copy"):
        kybernate("evict", image, "--from", "ram")
    assert not verify(MEMORY / image)

    kybernate("demote", image, "--to", "object")
    eventually(lambda: tiers_of(agent, image) == {"object"})
    assert not (MEMORY / image).exists()
    assert not (ROOT / image).exists()

    kybernate("promote", image, "--to", "disk")
    eventually(lambda: tiers_of(agent, image) == {"disk", "object"})
    assert not verify(ROOT / image)
    goes_on(ours, image, tmp_path)

    kybernate("evict", image, "--from", "object")
    eventually(lambda: tiers_of(agent, image) == {"disk"})
    with pytest.raises(CommandFailed, match="no other tier has a good copy"):
        kybernate("evict", image, "--from", "disk")
    goes_on(ours, image, tmp_path)


def test_what_is_named_is_known_and_is_what_leaves(agent: NodeAgent, image: str, tmp_path: Path) -> None:
    """Copies of one image under other names: pulled, and moved by hand."""
    agent.write(agent.settings + "[tiers.policy]\nenabled = false\n")
    id = agent.call("Checkpoints", "GetImage", wire.GetImageRequest(image=image)).id
    kybernate("export", image, str(tmp_path / "image.tar"))
    others = [f"{image}-{letter}" for letter in "abc"]
    try:
        for name in others[:2]:
            kybernate("pull", str(tmp_path / "image.tar"), name, "--yes")
            (listed,) = json.loads(kybernate("images", name, "-o", "json"))  # as soon as the command has ended
            assert str(ROOT / name) in [one["place"] for one in listed["replicas"]]
        kybernate("store", "put", image)
        for argv in (("evict", id, "--from", "disk"), ("demote", id, "--to", "object")):
            with pytest.raises(CommandFailed, match=f"is the name of 3 checkpoint images[^$]*{ROOT / others[1]}"):
                kybernate(*argv)
        kybernate("evict", others[1], "--from", "disk")
        there = [name for name in (image, *others) if (ROOT / name).exists()]
        assert there == [image, others[0]]
        (ROOT / others[0]).rename(ROOT / others[2])
        assert kybernate("pin", others[2]) == f"pinned {others[2]}\n"
        kybernate("demote", str(ROOT / others[2]), "--to", "object")
        assert [name for name in (image, *others) if (ROOT / name).exists()] == [image]
        kybernate("evict", id, "--from", "object")
        assert not verify(ROOT / image)
    finally:
        for name in others:
            shutil.rmtree(ROOT / name, ignore_errors=True)


def test_changed_word_of_a_manifest_is_the_verdict(agent: NodeAgent, image: str) -> None:
    assert "the signature is valid here" in kybernate("inspect", image, "--verify").splitlines()[-1]
    manifest = ROOT / image / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"python:latest", b"python:newest"))
    said = refused("kybernate", "inspect", image, "--verify").splitlines()[-1]
    assert "the manifest was changed after it was signed" in said
    begun = agent.call("Checkpoints", "VerifyImage", wire.VerifyImageRequest(image=image))
    ended = agent.until(begun.id, lambda one: one.state in (wire.SUCCEEDED, wire.FAILED))
    assert (ended.state, "changed after it was signed" in ended.error.message) == (wire.FAILED, True)


def test_fresh_node_knows_what_the_store_has(agent: NodeAgent, image: str, second: Second) -> None:
    kybernate("demote", image, "--to", "object")
    second.agent.start(second.there())
    second.agent.wait_ready()
    eventually(lambda: second.agent.lines("store.listed"))
    assert tiers_of(second.agent, image) == {"object"}
    (listed,) = [line for line in second.asked("images").splitlines() if image in line]
    assert listed.split()[-2:] == ["object", "elsewhere"]
    (known,) = json.loads(second.asked("images", "-o", "json"))
    assert [(one["node"], one["tier"], one["state"]) for one in known["replicas"]] == [("", "object", "complete")]

    second.asked("promote", image, "--to", "disk")
    assert not verify(OTHER / image)
    eventually(lambda: tiers_of(second.agent, image) == {"disk", "object"})

    fresh = ["registry", "rebuild", "--url", f"sqlite:///{agent.place}/fresh.db"]
    assert "store: 1 images added, 0 removed" in kybernate(*fresh)
    kybernate("store", "rm", image)
    eventually(lambda: tiers_of(second.agent, image) == {"disk"})
    assert "store: 0 images added, 1 removed" in kybernate(*fresh)


def test_copy_outlives_the_agent(agent: NodeAgent, image: str, server: Server) -> None:
    kybernate("demote", image, "--to", "object")
    agent.stop()
    agent.settings += "bytes_per_second = 8000000\nparallel = 1\n"
    agent.start()
    agent.wait_ready()
    begun = agent.call("Checkpoints", "CopyImage", wire.CopyImageRequest(image=image, tier="disk"))
    arriving = ROOT / f".kybernate-arriving-{image}"
    agent.until(begun.id, lambda one: one.progress.done_bytes > 16 << 20)
    agent.stop(signal.SIGKILL)
    assert arriving.is_dir()
    assert not (ROOT / image).exists()
    agent.start()
    agent.wait_ready()
    agent.done(begun.id)
    assert not arriving.exists()
    assert not verify(ROOT / image)


def test_cancelled_copy_leaves_nothing(agent: NodeAgent, image: str) -> None:
    kybernate("demote", image, "--to", "object")
    agent.stop()
    agent.settings += "bytes_per_second = 1000000\nparallel = 1\n"
    agent.start()
    agent.wait_ready()
    begun = agent.call("Checkpoints", "CopyImage", wire.CopyImageRequest(image=image, tier="ram"))
    eventually(lambda: list(MEMORY.glob(".kybernate-arriving-*")))
    agent.operation("CancelOperation", wire.CancelOperationRequest(id=begun.id))
    assert agent.ended(begun.id).state == wire.CANCELLED
    assert list(MEMORY.iterdir()) == []
    assert tiers_of(agent, image) == {"object"}


def test_store_that_is_away_is_named_and_nothing_is_lost(agent: NodeAgent, image: str, server: Server) -> None:
    server.kill()
    with pytest.raises(CommandFailed, match="s3://"):
        kybernate("demote", image, "--to", "object", timeout=120)
    assert not verify(ROOT / image)
    assert tiers_of(agent, image) == {"disk"}


def test_full_memory_is_relieved_by_policy(agent: NodeAgent, image: str) -> None:
    agent.stop()
    agent.settings += f"[tiers.ram]\nquota = {100 << 20}\nhigh = 0.5\nlow = 0.4\n[tiers.policy]\ninterval = 1\n"
    agent.start()
    agent.wait_ready()
    kybernate("promote", image)
    (submitted,) = eventually(lambda: agent.lines("policy.submitted"), seconds=40)  # the copy may not be listed before
    eventually(lambda: not (MEMORY / image).exists(), seconds=40)
    eventually(lambda: tiers_of(agent, image) == {"disk"}, seconds=40)
    assert submitted["verb"] == "evict"
    assert not verify(ROOT / image)


def test_old_images_of_a_workload_go_by_policy(agent: NodeAgent, ours: Ctr) -> None:
    with counting(ours) as witness:
        names = [f"tiers-{witness.id}-{number}" for number in range(3)]
        for name in names:
            kybernate("checkpoint", witness.id, name)
        found = eventually(lambda: agent.registered(names[2]))
        agent.call("Checkpoints", "PinImage", wire.PinImageRequest(image=names[0], pinned=True))
        agent.stop()
        agent.settings += "[tiers.policy]\ninterval = 1\nttl = 1\n"
        agent.start()
        agent.wait_ready()
        assert found.id
        eventually(lambda: [name for name in names if (ROOT / name).exists()] == [names[0]], seconds=40)
        assert not verify(ROOT / names[0])
        shutil.rmtree(ROOT / names[0])


def test_command_ends_with_its_own_status_however_its_librarys_threads_end(agent: NodeAgent) -> None:
    """An interpreter that ends kills threads of Rust's that ask for its lock, which abort the process: one in ten."""
    runs = [subprocess.run(["kybernate", "store", "ls"], capture_output=True, timeout=60) for _ in range(30)]
    assert {one.returncode for one in runs} == {0}


def test_unknown_tier_is_refused(agent: NodeAgent, ours: Ctr) -> None:
    with counting(ours) as witness:
        kybernate("checkpoint", witness.id, f"tiers-{witness.id}")
        eventually(lambda: agent.registered(f"tiers-{witness.id}"))
        with pytest.raises(CommandFailed, match="'tape' is not a tier of this node: ram, disk, object"):
            kybernate("promote", f"tiers-{witness.id}", "--to", "tape")
        shutil.rmtree(ROOT / f"tiers-{witness.id}")


# ---- pods

COUNTER = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done"]
FROM = "kybernate.io/restore-from"


@pytest.fixture
def for_shims(agent: NodeAgent) -> Iterator[NodeAgent]:
    """The agent, with its socket for shims where they look for it."""
    IMAGES_SOCKET.symlink_to(agent.place / "run" / IMAGES_SOCKET.name)
    yield agent
    IMAGES_SOCKET.unlink()


def in_the_store_alone(agent: NodeAgent, image: Path) -> None:
    eventually(lambda: agent.registered(f"default/{image.name}"))
    kybernate("demote", f"default/{image.name}", "--to", "object")
    eventually(lambda: not image.exists())


def counted(cri: Cri, pod: Pod) -> int:
    return int(cri.log(pod, "counter")[-1])


def test_latest_of_a_pod_is_found_in_the_store(for_shims: NodeAgent) -> None:
    with Cri("kybernate") as cri, pods_place() as first, pods_place() as second:
        with cri.pod() as pod:
            cri.run(pod, "counter", COUNTER)
            cri.await_log(pod, "counter", "5")
            name = f"default/{pod.config.metadata.name}/counter"
            kybernate("checkpoint", name, first.name)
            cri.await_log(pod, "counter", str(counted(cri, pod) + 5))
            kybernate("checkpoint", name, second.name, "--exit")
            last = counted(cri, pod)
        in_the_store_alone(for_shims, second)
        with cri.pod(annotations={FROM: f"{first.name}@latest"}) as pod:
            cri.run(pod, "counter", ["/never/run"])
            assert eventually(lambda: cri.log(pod, "counter"))[0] == str(last + 1)
            with pods_place() as third:
                kybernate("checkpoint", f"default/{pod.config.metadata.name}/counter", third.name)
                eventually(lambda: for_shims.registered(f"default/{third.name}"))
                found = for_shims.call("Checkpoints", "GetImage", wire.GetImageRequest(image=f"default/{third.name}"))
                assert found.parent == read_image(second).manifest.id
        in_the_store_alone(for_shims, second)
        in_the_store_alone(for_shims, first)
        with cri.pod(annotations={FROM: f"{first.name}@latest"}) as pod:  # neither is on the node
            cri.run(pod, "counter", ["/never/run"])
            assert eventually(lambda: cri.log(pod, "counter"))[0] == str(last + 1)
