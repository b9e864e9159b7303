"""`kybernate up`: models behind one address that come back without loading, and a `down` that leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kybernate.messages import cri_runtime_pb2
from kybernate.up import control
from kybernate.up.pods import LOGS, Pods, Running
from kybernate_shim.config import Config
from tests.documentation import block
from tests.system import node_agent
from tests.system.checkpoints import PYTHON
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually
from tests.system.node_agent import NodeAgent

KYBERNATE = (sys.executable, "-c", "from kybernate.cli import main; main()")
PROJECT = "lab"
URL = "http://127.0.0.1:18080"
# Says what it was loaded with, which a program that is started again has another one of; ends when it is asked to.
SERVER = """
import http.server, json, os, secrets, sys
loaded = secrets.token_hex(8)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def answer(self, text):
        self.send_response(200); self.send_header("Content-Length", str(len(text))); self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self): self.answer("ok")
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"end yourself" in body: os._exit(7)
        self.answer(json.dumps({"model": sys.argv[2], "loaded": loaded, "pid": os.getpid()}))
print("loaded", loaded, flush=True)
host = sys.argv[3] if sys.argv[3:] else "127.0.0.1"
http.server.ThreadingHTTPServer((host, int(sys.argv[1])), Handler).serve_forever()
"""
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
ARGUMENTS = f"-c, {json.dumps(SERVER)}, '${{PORT}}', '${{MODEL}}'"


@dataclass
class Machine:
    """A machine with a file of models, and the agent."""

    directory: Path
    agent: NodeAgent

    @property
    def file(self) -> Path:
        return self.directory / "models.yaml"

    def write(self, *models: str, extra: str = "") -> None:
        lines = [f"project: {PROJECT}", "listen: 127.0.0.1:18080", "defaults: {start-timeout: 60s}", "models:"]
        self.file.write_text("\n".join([*lines, *models, extra]) + "\n")

    def kybernate(self, *words: str, status: int = 0) -> str:
        done = subprocess.run(
            [*KYBERNATE, *words], capture_output=True, text=True, check=False, cwd=self.directory, timeout=120
        )
        assert done.returncode == status, done.stdout + done.stderr + self.log()
        return done.stdout + done.stderr

    def up(self, *words: str) -> None:
        self.kybernate("up", "models.yaml", "-d", "--agent", self.agent.address, *words)

    def log(self) -> str:
        path = LOGS / PROJECT / "up.log"
        return path.read_text() if path.exists() else ""

    def pods(self) -> dict[str, Running]:
        with Pods(PROJECT) as pods:
            return pods.list()


def of_image(name: str) -> str:
    return f"  {name}: {{image: '{PYTHON}', command: [python3, {ARGUMENTS}], user: 1000}}"


def of_host(name: str) -> str:
    return f"  {name}: {{command: [/usr/bin/python3, {ARGUMENTS}], user: 1000}}"


def in_pod(name: str) -> str:
    """A model with a network of its own; its port is that of others, too."""
    return f"  {name}: {{image: '{PYTHON}', command: [python3, {ARGUMENTS}, '0.0.0.0'], user: 1000, network: pod}}"


def ask(model: str, text: str = "hello") -> Any:
    """Send a model a request by the one address; None where it did not answer."""
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    try:
        answer = httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=30)
    except httpx.TransportError:
        return None
    return answer.json() if answer.is_success else None


def loaded(model: str) -> str:
    return str((ask(model) or {}).get("loaded", ""))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with node_agent.short_place() as place, node_agent.running(place) as agent:
        machine = Machine(tmp_path, agent)
        try:
            yield machine
        finally:
            if machine.file.exists():
                machine.kybernate("down", "models.yaml", "--agent", machine.agent.address)
            shutil.rmtree(Config().checkpoint_root / PROJECT, ignore_errors=True)
            shutil.rmtree(LOGS, ignore_errors=True)
            shutil.rmtree(control.LOCKS, ignore_errors=True)


def ready(machine: Machine, *models: str) -> dict[str, str]:
    """Wait until models answer and have their templates; return what each was loaded with."""
    for model in models:
        try:
            eventually(lambda name=model: loaded(name), seconds=90)
            eventually(lambda name=model: f"{name}: ready at" in machine.log(), seconds=90)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{machine.log()}") from error
    return {model: loaded(model) for model in models}


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


def test_only_what_changed_in_the_file_is_touched(machine: Machine) -> None:
    machine.write(of_image("one"), of_image("two"))
    machine.up()
    before, containers = ready(machine, "one", "two"), machine.pods()
    machine.write(of_image("one"), of_image("two").replace("user: 1000", "user: 1001"), of_host("three"))
    assert "reads the file again" in machine.kybernate("up", "models.yaml")
    eventually(lambda: loaded("three"), seconds=90)
    eventually(lambda: loaded("two") not in ("", before["two"]), seconds=90)
    assert loaded("one") == before["one"]
    assert machine.pods()["one"].container == containers["one"].container
    machine.write(of_image("one"))
    machine.kybernate("up", "models.yaml")
    eventually(lambda: set(machine.pods()) == {"one"}, seconds=60)
    assert loaded("one") == before["one"]


def test_file_is_followed(machine: Machine) -> None:
    """A change is done without a command; a mistake is said, and changes nothing."""
    machine.write(of_image("one"))
    machine.up("--watch")
    before = ready(machine, "one")
    machine.write(of_image("one"), "  two: {imag: x}")
    eventually(lambda: "models.two.imag is unknown" in machine.log())
    assert loaded("one") == before["one"]
    machine.write(of_image("one"), of_host("two"))
    ready(machine, "two")
    assert loaded("one") == before["one"]


def test_model_on_disk_comes_back_and_is_restarted(machine: Machine) -> None:
    machine.write(of_image("one"))
    machine.up()
    before = ready(machine, "one")
    process = ask("one")["pid"]
    assert "one is on disk" in machine.kybernate("sleep", "one", "--disk")
    assert machine.pods() == {}
    assert json.loads(machine.kybernate("models", "models.yaml", "-o", "json"))[0]["state"] == "on disk"
    assert loaded("one") == before["one"]
    assert "one is ready" in machine.kybernate("restart", "one", "--file", "models.yaml")
    assert loaded("one") == before["one"]
    assert ask("one")["pid"] == process  # as a restore has it
    machine.kybernate("restart", "one", "--fresh", "--file", "models.yaml")
    eventually(lambda: loaded("one") not in ("", before["one"]), seconds=60)
    assert "no model is called none" in machine.kybernate("restart", "none", "--file", "models.yaml", status=3)
    assert "one: " in machine.kybernate("up", "models.yaml", "--pull")


def at_rest() -> bool:
    """Return whether containerd has no task that is created and not started."""
    return "CREATED" not in Ctr(namespace="k8s.io")("task", "ls")


def test_kill_at_any_step_is_taken_over(machine: Machine) -> None:
    """`up` is killed as soon as it says that a step begins, `down` when it has removed one of two."""
    machine.write(of_image("one"), of_host("two"))
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


def test_template_that_does_not_restore_is_replaced(machine: Machine) -> None:
    """As after a change of the driver: the program starts from the beginning, which one line says."""
    machine.write(of_image("one"))
    machine.up()
    before = ready(machine, "one")
    (place,) = (Config().checkpoint_root / PROJECT).glob("one-*")
    for file in place.glob("pages-*.img"):
        file.write_bytes(b"damaged")
    ask("one", "end yourself")
    eventually(lambda: loaded("one") not in ("", before["one"]), seconds=90)
    assert machine.log().count("starts from zero") == 1
    eventually(lambda: machine.log().count("one: saving") == 2, seconds=60)
    eventually(lambda: machine.log().count("one: ready at") == 2, seconds=60)
    second = loaded("one")
    ask("one", "end yourself")
    assert eventually(lambda: loaded("one"), seconds=90) == second


def test_models_have_networks_of_their_own(machine: Machine) -> None:
    """By the node's CNI configuration: each comes back under another address, and is found there."""
    machine.write(in_pod("one"), of_host("two"))
    machine.up()
    before = ready(machine, "one", "two")
    first = machine.pods()["one"].address
    assert first != machine.pods()["two"].address == "127.0.0.1"
    ask("one", "end yourself")
    eventually(lambda: loaded("one"), seconds=90)
    assert loaded("one") == before["one"]
    assert machine.pods()["one"].address != "127.0.0.1"


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


def test_broken_file_changes_nothing(machine: Machine) -> None:
    machine.write(of_image("one"))
    machine.up()
    before = ready(machine, "one")
    good = machine.file.read_text()
    machine.file.write_text(good + "  two: {imag: x}\n")
    said = machine.kybernate("up", "models.yaml", status=2)
    assert "models.two.imag is unknown" in said
    os.kill(control.running_process(PROJECT), signal.SIGHUP)
    eventually(lambda: "the file is not used as it is now" in machine.log())
    assert loaded("one") == before["one"]
    machine.file.write_text(good)


def test_program_that_cannot_start_is_said_and_does_not_block_the_others(machine: Machine) -> None:
    broken = f"  bad: {{image: '{PYTHON}', command: [python3, -c, 'raise SystemExit(3)'], priority: 5}}"
    absent = "  absent: {image: 'localhost:5000/no-such-image:1', priority: 6}"
    machine.write(broken, absent, of_image("good"))
    machine.up()
    assert ready(machine, "good")
    eventually(lambda: "bad: its program has ended with status 3" in machine.log(), seconds=60)
    assert "bad: backing off" in machine.log()
    eventually(lambda: "absent: pulling failed" in machine.log(), seconds=60)


def test_logs_are_those_of_the_program(machine: Machine) -> None:
    machine.write(of_image("one"))
    machine.up()
    before = ready(machine, "one")
    assert f"loaded {before['one']}" in machine.kybernate("logs", "one", "--file", "models.yaml")
    assert "has no model none" in machine.kybernate("logs", "none", "--file", "models.yaml", status=3)


def test_one_process_keeps_a_project(machine: Machine) -> None:
    machine.write(of_image("one"))
    machine.up()
    ready(machine, "one")
    first = control.running_process(PROJECT)
    assert f"process {first} keeps" in machine.kybernate("up", "models.yaml", "-d")
    assert control.running_process(PROJECT) == first
