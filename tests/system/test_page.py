"""The web page over a real agent: what a container does is on it, and its buttons are operations of the agent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kybernate.messages import cri_runtime_pb2 as wire
from tests.system import gpu, node_agent
from tests.system.checkpoints import counting
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually
from tests.system.node_agent import NodeAgent

KYBERNATE = (sys.executable, "-c", "from kybernate.cli import main; main()")
SHOWN = 2  # times that the state of an operation is in its row: as a word, and for its colour
URL = "http://127.0.0.1:7070"


@pytest.fixture
def agent() -> Iterator[NodeAgent]:
    with node_agent.short_place() as place, node_agent.running(place) as running:
        yield running


@contextmanager
def page(agent: NodeAgent) -> Iterator[Path]:
    """Run the page of an agent; yield the socket for links."""
    socket = agent.place / "page.sock"
    command = [*KYBERNATE, "page", "serve", "--agent", agent.address, "--socket", socket]
    command += ["--session-key", agent.place / "page.key"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=(agent.place / "page.log").open("wb")) as process:
        try:
            eventually(lambda: answers() or process.poll() is not None, seconds=40, pause=0.1)
            assert process.poll() is None, (agent.place / "page.log").read_text()
            yield socket
        finally:
            process.terminate()
            assert process.wait(20) == 0, (agent.place / "page.log").read_text()


def answers() -> bool:
    try:
        return httpx.get(f"{URL}/healthz").is_success
    except httpx.TransportError:
        return False


@contextmanager
def session(socket: Path, role: str = "operator", user: tuple[str, ...] = ()) -> Iterator[httpx.Client]:
    """Yield a client that has followed a link."""
    asked = [*user, *KYBERNATE, "page", "--role", role, "--socket", str(socket)]
    link = subprocess.run(asked, capture_output=True, text=True, check=True, cwd="/").stdout.strip()
    with httpx.Client(base_url=URL, timeout=20) as client:
        assert client.post("/login", data={"ticket": link.partition("ticket=")[2]}).status_code == 303
        yield client


def row(client: httpx.Client, id: str) -> str:
    """Return the row of a container, without its markup."""
    shown = client.get("/section/containers").text
    found = re.search(rf'<tr id="container-[^"]*{id}"[^>]*>(.*?)</tr>', shown, re.DOTALL)
    return re.sub(r"<[^>]+>", " ", found[1]) if found else ""


def ask(client: httpx.Client, action: str, key: str) -> str:
    """Confirm an action as the page's form does, and return what the page says of it."""
    form = client.get("/confirm", params={"action": action, "key": key, "fragment": "1"}).text
    proof = re.search(r'name="proof" value="([^"]+)"', form)
    assert proof
    answer = client.post("/act", data={"action": action, "key": key, "proof": proof[1], "fragment": "1"})
    return f"{answer.status_code} {re.sub('<[^>]+>', '', answer.text).strip()}"


def test_container_is_suspended_and_woken_by_the_page(agent: NodeAgent, ours: Ctr) -> None:
    gpus = gpu.install_driver()
    try:
        with gpu.computing(ours) as container, page(agent) as socket, session(socket) as client:
            key = f"{ours.namespace}/{container.id}"
            eventually(lambda: "running" in row(client, container.id))
            assert ask(client, "sleep", key).startswith("200 sleep of ")
            eventually(lambda: "suspended" in row(client, container.id))
            eventually(lambda: "It is suspended" in client.get("/container", params={"container": key}).text)
            assert ask(client, "wake", key).startswith("200 wake of ")
            eventually(lambda: re.search(r"running.* (ms|s)\b", row(client, container.id), re.DOTALL))
            eventually(lambda: client.get("/section/operations").text.count("succeeded") == 2 * SHOWN)
            eventually(lambda: "container.resumed" in client.get("/section/events").text)
    finally:
        gpu.heal(gpus)
        gpu.forget_helper()
        gpu.remove_driver()


def test_action_without_an_agent_is_refused_and_changes_nothing(agent: NodeAgent, ours: Ctr) -> None:
    with counting(ours) as counter, page(agent) as socket, session(socket) as client:
        eventually(lambda: row(client, counter.id))
        agent.stop()
        said = ask(client, "sleep", f"{ours.namespace}/{counter.id}")
        assert said.startswith("409 ")
        assert "no agent" in said
        assert ours.status(counter.id) == "RUNNING"


def test_agent_that_dies_is_said_and_found_again(agent: NodeAgent, ours: Ctr) -> None:
    with counting(ours) as counter, page(agent) as socket, session(socket) as client:
        eventually(lambda: row(client, counter.id))
        agent.stop()
        eventually(lambda: "does not answer" in client.get("/section/status").text)
        assert row(client, counter.id)
        agent.start()
        agent.wait_ready()
        eventually(lambda: "answers" in client.get("/section/status").text)


def test_other_user_gets_no_link_of_an_operator(agent: NodeAgent) -> None:
    with page(agent) as socket:
        for directory in (agent.place, socket):
            directory.chmod(0o777)
        nobody = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups")
        refused = subprocess.run(
            [*nobody, *KYBERNATE, "page", "--socket", str(socket)], capture_output=True, text=True, check=False, cwd="/"
        )
        assert refused.returncode != 0
        assert "may have a link for a viewer alone" in refused.stderr
        with session(socket, "viewer", nobody) as client:
            assert client.get("/confirm", params={"action": "wake", "key": "x"}).status_code == 403
            assert client.get("/section/containers").status_code == 200


def logged(client: httpx.Client, key: str, count: int) -> list[str]:
    """Return the first lines that the page streams of a container's output."""
    found: list[str] = []
    with client.stream("GET", "/log", params={"container": key}) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                return found
    raise AssertionError(f"the stream ended after {found}")


def test_output_is_followed_by_the_agent(agent: NodeAgent, ours: Ctr) -> None:
    with counting(ours) as counter, page(agent) as socket, session(socket) as client:
        eventually(lambda: row(client, counter.id))
        lines = logged(client, f"{ours.namespace}/{counter.id}", counter.count() + 2)
        assert int(lines[-1]) == int(lines[-2]) + 1
        with session(socket, "viewer") as viewer:
            refused = viewer.get("/log", params={"container": f"{ours.namespace}/{counter.id}"})
            assert refused.status_code == 403
            assert lines[-1] not in refused.text


def test_output_of_a_pod_is_joined_and_followed_over_a_rotation(agent: NodeAgent) -> None:
    script = (
        "head -c 20000 /dev/zero | tr '\\0' x; echo; echo second >&2; while :; do sleep 0.2; echo $((n += 1)); done"
    )
    with Cri() as cri, cri.pod(namespace="team") as pod, page(agent) as socket, session(socket) as client:
        id = cri.run(pod, "talks", ["sh", "-c", script])
        eventually(lambda: row(client, id))
        log = Path(cri.status(id).log_path)
        eventually(lambda: len(log.read_text().splitlines()) > 5)
        lines = logged(client, f"k8s.io/{id}", 4)  # those of the two outputs in any order
        assert "x" * 16384 + " […]" in lines  # of a line that came in two parts
        assert "second" in lines
        with client.stream("GET", "/log", params={"container": f"k8s.io/{id}"}) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line == 'data: "3"')
            log.rename(log.with_name(f"{log.name}.20260101-000000"))
            cri.call("ReopenContainerLog", wire.ReopenContainerLogRequest(container_id=id))
            new = eventually(lambda: log.exists() and log.read_text().splitlines())[0].rpartition(" ")[2]
            next(line for line in lines if line == f'data: "{new}"')
            cri.stop(id)
            cri.remove(id)
            assert next(lines for line in lines if line == "event: absent")


def test_form_of_another_site_does_nothing(agent: NodeAgent, ours: Ctr) -> None:
    with counting(ours) as counter, page(agent) as socket, session(socket) as client:
        eventually(lambda: row(client, counter.id))
        forged = {"action": "checkpoint", "key": f"{ours.namespace}/{counter.id}", "proof": "0" * 64}
        assert client.post("/act", data=forged).status_code == 403
        assert "checkpoint" not in client.get("/section/operations").text
