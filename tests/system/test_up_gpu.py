"""`kybernate up` with a GPU that has room for one of its models: peers, windows, seats and the arena."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from kybernate.up.pods import Pods
from kybernate_shim.arena.memory import FOLDER
from tests.fakes.cuda import Gpus
from tests.system import demo, gpu
from tests.system.ctr import eventually
from tests.system.gpu.seats import SeatsAgent, seats_agent

ALWAYS = 'windows: [{from: "00:00", to: "24:00"}]'


def models(*lines: str, more: str = "") -> str:
    """Return a file with these models, each of which takes most of the GPU."""
    head = demo.FILE.partition("models:\n")[0]
    return f"{head}{more}models:\n" + "".join(f"  {line}\n" for line in lines)


def owner_of(gpus: Gpus) -> int:
    """Return how many programs have memory of the GPU."""
    return sum(1 for sizes in gpus.held().values() if sizes[0])


@contextmanager
def peer(*names: str) -> Iterator[str]:
    """Another host with models; each answers with its name."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_POST(self) -> None:
            model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
            message = {"role": "assistant", "content": f"{model} of the peer"}
            body = json.dumps({"model": model, "choices": [{"index": 0, "message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"{{url: 'http://127.0.0.1:{server.server_address[1]}', models: [{', '.join(names)}]}}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def at_work(machine: demo.Machine, model: str) -> Iterator[None]:
    """Have a request in flight at a model while the block runs; it is answered in the end."""
    go = machine.place / "go"
    body = {"model": model, "messages": [], "until": "/demo/go"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{demo.URL}/v1/chat/completions", json=body, timeout=60)
        try:
            eventually(lambda: in_flight(machine, model) == 1, seconds=40)
            yield
        finally:
            go.touch()
            assert asked.result().is_success
            go.unlink()


def in_flight(machine: demo.Machine, model: str) -> int:
    listed = json.loads(machine.kybernate("models", "-o", "json"))
    return sum(one["in_flight"] for one in listed if one["model"] == model)


def test_window_keeps_a_model_awake_and_a_peer_has_what_finds_no_room() -> None:
    """A model in its window wakes by itself. While it works, the other one is asked of the peer."""
    with (
        peer("coder", "far") as other,
        demo.machine(models(f"poet: {{{ALWAYS}}}", "coder: {}", more=f"peers: {{other: {other}}}\n")) as machine,
    ):
        machine.up()
        machine.wait_ready(1, ("poet", "coder"))
        eventually(lambda: machine.models() == {"poet": "awake", "coder": "asleep"}, seconds=60)
        listed = httpx.get(f"{demo.URL}/v1/models").json()["data"]
        assert {one["id"] for one in listed} == {"poet", "coder", "far"}
        assert demo.ask("far") == "far of the peer"
        with at_work(machine, "poet"):
            assert demo.ask("coder") == "coder of the peer"
        assert machine.models()["coder"] == "asleep"
        assert demo.ask("coder").startswith("coder:")  # nothing is asked of the other one now, and so it leaves
        eventually(lambda: machine.models() == {"poet": "awake", "coder": "asleep"}, seconds=60)
        assert owner_of(machine.gpus) == 1


def crowded(machine: demo.Machine, model: str) -> bool:
    listed = json.loads(machine.kybernate("models", "-o", "json"))
    return any(one["crowded"] for one in listed if one["model"] == model)


@contextmanager
def explained(machine: demo.Machine) -> Iterator[None]:
    """Print what the models, the agent and the arbiter do where the block fails."""
    try:
        yield
    except BaseException:
        print(machine.log()[-6000:])
        for words in (("models",), ("ps", "-o", "wide"), ("seats", "--all", "-o", "wide"), ("ops",)):
            print(machine.kybernate(*words))
        raise


@contextmanager
def seats(place: Path) -> Iterator[SeatsAgent]:
    with seats_agent(place, seats=2) as agent:
        yield agent


def test_models_with_seats_have_their_turns_by_the_arbiter() -> None:
    run: AbstractContextManager[demo.Machine] = demo.machine(
        models("poet: {seat: one, priority: 1}", "coder: {seat: one}"), run_agent=seats
    )
    with run as machine, explained(machine):
        machine.up()
        machine.wait_ready(1, ("poet", "coder"))
        assert "the agent has no seats" not in machine.log()
        agent = machine.agent
        assert isinstance(agent, SeatsAgent)
        with Pods("demo") as pods:
            containers = {name: one.container for name, one in pods.list().items()}
        found = agent.seats()
        assert {found[id].profile for id in containers.values()} == {"one"}
        assert found[containers["poet"]].priority == 1
        first = {name: demo.ask(name) for name in ("poet", "coder")}
        agent.becomes(containers["coder"], "active")
        agent.becomes(containers["poet"], "suspended")
        assert owner_of(machine.gpus) == 1
        assert {name: demo.ask(name) for name in ("poet", "coder")} == first
        machine.reboot()
        machine.up()
        assert {name: demo.ask(name) for name in ("poet", "coder")} == first
        assert "from zero" not in machine.log()


def test_model_whose_seat_finds_no_room_is_asked_of_the_peer() -> None:
    with peer("coder") as other:
        file = models("poet: {seat: one}", "coder: {seat: one}", more=f"peers: {{other: {other}}}\n")
        run: AbstractContextManager[demo.Machine] = demo.machine(file, run_agent=seats)
        with run as machine, explained(machine):
            machine.up()
            machine.wait_ready(1, ("poet", "coder"))
            assert demo.ask("poet").startswith("poet:")
            with at_work(machine, "poet"):
                eventually(lambda: crowded(machine, "coder"))
                assert demo.ask("coder") == "coder of the peer"
            assert machine.models()["coder"] == "asleep"
            eventually(lambda: not crowded(machine, "coder"), seconds=60)  # once its requests have ended
            assert demo.ask("coder").startswith("coder:")
            assert owner_of(machine.gpus) == 1


def test_changed_priority_of_a_seat_is_the_arbiters_at_once() -> None:
    run: AbstractContextManager[demo.Machine] = demo.machine(
        models("poet: {seat: one, priority: 1}", "coder: {seat: one}"), run_agent=seats
    )
    with run as machine, explained(machine):
        machine.up()
        machine.wait_ready(1, ("poet", "coder"))
        agent = machine.agent
        assert isinstance(agent, SeatsAgent)
        first = {name: demo.ask(name) for name in ("poet", "coder")}
        with Pods("demo") as pods:
            before = pods.list()
        machine.file.write_text(machine.file.read_text().replace("priority: 1", "priority: 7"))
        machine.kybernate("up", "models.yaml")
        eventually(lambda: agent.seats()[before["poet"].container].priority == 7)
        assert agent.seats()[before["coder"].container].priority == 0
        with Pods("demo") as pods:
            assert pods.list() == before  # nothing was touched
        assert {name: demo.ask(name) for name in ("poet", "coder")} == first


def test_seats_that_the_agent_has_not_are_said_and_sizes_decide() -> None:
    with demo.machine(models("poet: {seat: one}", "coder: {}")) as machine:
        machine.up()
        machine.wait_ready(1, ("poet", "coder"))
        assert "the agent has no seats: room for poet is decided here" in machine.log()
        assert len({demo.ask("poet"), demo.ask("coder")}) == 2
        assert owner_of(machine.gpus) == 1


@pytest.fixture
def arena(shim_config: Path) -> Iterator[Callable[[], None]]:
    """What gives the node an arena, which it has not any more when the test has ended."""
    yield lambda: shim_config.write_text(f'[gpu]\narena = "{4 * demo.MODEL_BYTES // demo.MIB}MiB"\n') and None
    gpu.forget_helper()
    if FOLDER.is_mount():
        subprocess.run(["umount", FOLDER], check=True)
    shutil.rmtree(FOLDER, ignore_errors=True)


def test_arena_is_asked_for_unless_a_model_does_not_want_it(arena: Callable[[], None]) -> None:
    """Also of a template that was saved before the node had an arena: its program comes back without the library."""
    with demo.machine(models("poet: {}", "coder: {arena: false}")) as machine, explained(machine):
        machine.up()
        machine.wait_ready(1, ("poet", "coder"))
        first = {name: demo.ask(name) for name in ("poet", "coder")}
        arena()
        machine.kybernate("restart", "poet")
        assert demo.ask("poet") == first["poet"]
        for name, wanted in (("coder", False), ("poet", True)):
            machine.kybernate("restart", name, "--fresh")
            assert demo.ask(name) != first[name]
            assert loads_library(machine.process_of(name)) is wanted


def loads_library(process: psutil.Process) -> bool:
    return "kybernate-arena" in process.environ().get("LD_PRELOAD", "")
