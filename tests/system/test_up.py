"""`kybernate up`: models behind one address that come back without loading, and a `down` that leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.messages import cri_runtime_pb2
from kybernate.up import control
from kybernate.up.pods import Pods
from tests.documentation import block
from tests.system import node_agent, up_machine
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually
from tests.system.leftovers import Snapshot
from tests.system.up_machine import KYBERNATE, PROJECT, Machine, ask, in_pod, loaded, of_host, of_image, ready

FORGOTTEN_SECONDS = 45.0  # until a daemon ends that has no container, see kybernate_shim/serve.py
# The lab has no curl; of its options it needs --json and --retry.
CURL = """
import sys, time
import httpx
words = sys.argv[1:]
body = words[words.index("--json") + 1] if "--json" in words else None
for left in range(9 if "--retry" in words else 1, 0, -1):
    try:
        answer = httpx.request("POST" if body else "GET", next(one for one in words if one.startswith("http://")),
                               content=body, headers={"Content-Type": "application/json"}, timeout=90)
        print(answer.text)
        sys.exit(0 if answer.is_success else 22)
    except httpx.TransportError as error:
        print(error, file=sys.stderr)
        time.sleep(1)
sys.exit(7)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with (
        node_agent.short_place() as place,
        node_agent.running(place) as agent,
        up_machine.machine(tmp_path, agent) as machine,
    ):
        yield machine


def test_models_come_back_without_loading(machine: Machine) -> None:
    """After their own end, a kill, an end of all that keeps them and a stop of their pods, as a reboot does it."""
    machine.write(of_image("one"), of_host("two"))
    machine.up()
    before = ready(machine, "one", "two")
    assert len(set(before.values())) == 2

    ask("one", "end yourself")
    eventually(lambda: loaded("one"), seconds=90)
    assert loaded("one") == before["one"]
    assert "one: its program has ended with status 7" in machine.log()
    assert "one: came back from its template" in machine.log()

    process = control.running_process(PROJECT)
    containers = {name: one.container for name, one in machine.pods().items()}
    os.kill(process, signal.SIGKILL)
    eventually(lambda: not control.running_process(PROJECT))
    machine.up()
    assert ready(machine, "one", "two") == before
    assert {name: one.container for name, one in machine.pods().items()} == containers  # they were taken over

    os.kill(control.running_process(PROJECT), signal.SIGKILL)
    eventually(lambda: not control.running_process(PROJECT))
    with Cri() as cri:
        for running in machine.pods().values():
            cri.call("StopPodSandbox", cri_runtime_pb2.StopPodSandboxRequest(pod_sandbox_id=running.pod))
    machine.up()
    for name in before:
        eventually(lambda name=name: loaded(name), seconds=90)
    assert {name: loaded(name) for name in before} == before


def test_three_models_of_the_manual(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new user's way, as docs/up.md prints it."""
    place = Path("/srv/models")
    place.mkdir(parents=True)
    try:
        (place / "answer.py").write_text(block("docs/up.md", "answer").text)
        machine.file.write_text("project: lab\n" + block("docs/up.md", "three-models").text)
        monkeypatch.setenv("KYBERNATE_AGENT", machine.agent.address)
        programs = machine.directory / "bin"
        programs.mkdir()
        (programs / "curl").write_text(f"#!{sys.executable}\n{CURL}")
        (programs / "curl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        said = ""
        for line in block("docs/up.md", "first-requests").commands:
            done = subprocess.run(
                ["bash", "-ec", line], cwd=machine.directory, capture_output=True, text=True, check=False, timeout=120
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}{machine.log()}"
            said += done.stdout
        for model in ("poet", "coder", "critic"):
            assert f"{model} has read: hello" in said
        assert "critic is on disk" in said
        assert "poet is ready" in said
        assert machine.pods() == {}
    finally:
        shutil.rmtree(place)


def daemons() -> frozenset[str]:
    return frozenset(one for one in Snapshot.take().shims if one.startswith("kybernate-shim"))


def at_rest() -> bool:
    """Return whether containerd has no task that is created and not started."""
    return "CREATED" not in Ctr(namespace="k8s.io")("task", "ls")


def test_kill_at_any_step_is_taken_over(machine: Machine) -> None:
    """`up` is killed as soon as it says that a step begins, `down` when it has removed one of two.

    A call of containerd whose client is gone may leave a daemon that containerd has forgotten: it ends by itself.
    """
    before_all = daemons()
    machine.write(of_image("one"), of_host("two").replace("user: 1000", "user: 1000, env: {STAYS: '1'}"))
    for step in ("starting", "loading", "saving", "suspending"):
        before = machine.log().count(f"one: {step}")
        machine.up()
        process = control.running_process(PROJECT)
        eventually(
            lambda step=step, before=before: machine.log().count(f"one: {step}") > before, seconds=90, pause=0.001
        )
        os.kill(process, signal.SIGKILL)
        eventually(lambda: not control.running_process(PROJECT))
        if step == "suspending":
            break
        eventually(at_rest, seconds=40)  # containerd ends a call whose client is gone, and takes back what it has made
        with Pods(PROJECT) as pods:
            images = [*pods.list().values()] if step != "saving" else []
            for running in images:
                pods.remove(running)
    machine.up()
    found = ready(machine, "one", "two")
    assert set(machine.pods()) == {"one", "two"}
    os.kill(control.running_process(PROJECT), signal.SIGKILL)
    eventually(lambda: not control.running_process(PROJECT))
    with subprocess.Popen(
        [*KYBERNATE, "down", "models.yaml", "--keep-images"], cwd=machine.directory, stderr=subprocess.PIPE, text=True
    ) as down:
        assert down.stderr is not None
        assert "removed" in down.stderr.readline()
        down.kill()
    machine.up()
    assert ready(machine, "one", "two") == found
    eventually(lambda: len(daemons() - before_all) == 2, seconds=FORGOTTEN_SECONDS)


def test_network_is_made_where_the_node_has_none_and_removed(machine: Machine) -> None:
    node = Path("/etc/cni/net.d/10-lab.conflist")
    away = node.with_suffix(".away")
    node.rename(away)
    try:
        with Pods(PROJECT) as pods:
            eventually(lambda: not pods.has_network())
        machine.write(in_pod("one"))
        machine.up()
        before = ready(machine, "one")
        assert machine.pods()["one"].address.startswith("10.200.")
        assert "made the network" in machine.log()
        rules = subprocess.run(
            ["nft", "list", "table", "inet", "kybernate-up-lab"], capture_output=True, text=True, check=True
        )
        assert 'oifname "kyb-lab" drop' in rules.stdout
        os.kill(control.running_process(PROJECT), signal.SIGKILL)  # a power cut
        machine.kybernate("down", "models.yaml", "--keep-images", "--agent", machine.agent.address)
        assert not Path("/sys/class/net/kyb-lab").exists()
        assert subprocess.run(
            ["nft", "list", "table", "inet", "kybernate-up-lab"], capture_output=True, check=False
        ).returncode
        assert sorted(Path("/etc/cni/net.d").iterdir()) == [away]
        machine.up()
        eventually(lambda: loaded("one"), seconds=90)
        assert loaded("one") == before["one"]
        machine.kybernate("down", "models.yaml", "--agent", machine.agent.address)
    finally:
        away.rename(node)
        with Pods(PROJECT) as pods:
            eventually(pods.has_network)
