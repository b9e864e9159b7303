"""`make demo`: three models of one file on a GPU that has room for one, step by step, in a throw-away node.

The last chapter is the same without a file: a pod that is checkpointed and removed, and comes back as another pod.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from kybernate.up import control
from kybernate.up.control import LOGS
from kybernate_shim.config import Config
from tests.fakes.cuda import Gpus
from tests.lab.node import Containerd
from tests.system import gpu, node_agent
from tests.system.cri import Cri, Pod
from tests.system.ctr import Ctr, eventually, run
from tests.system.node_agent import NodeAgent

KYBERNATE = (sys.executable, "-c", "from kybernate.cli import main; main()")
PYTHON = "localhost:5000/python:latest"
MODELS = ("poet", "coder", "critic")
MIB = 1 << 20
GPU_BYTES, MODEL_BYTES = 96 * MIB, 64 * MIB
URL, PAGE = "http://127.0.0.1:8080", "127.0.0.1:7070"
OF_NODE = ("kybernate", "containerd-shim")  # names of processes of the node: shims, their fork server
RUN_BY_NODE = ("/demo/server.py", "import main; main() agent", "import main; main() up")  # and parts of command lines
COUNTER = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done"]
# A model: it "loads" for a while, has its weights in VRAM, and every answer is read from there.
SERVER = """
import ctypes, http.server, json, os, secrets, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
port, name, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
cuda = ctypes.CDLL("libcuda.so.1")
def call(function, *arguments):
    result = getattr(cuda, function)(*arguments)
    assert result == 0, f"{function}: {result}"
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
time.sleep(1)  # of loading
weights = f"{name}:{secrets.token_hex(4)}".ljust(64).encode()
call("cuMemcpyHtoD_v2", memory, weights, ctypes.c_size_t(64))
print("loaded", weights.decode().strip(), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self): self.answer({"ok": True})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        while asked.get("until") and not os.path.exists(asked["until"]): time.sleep(0.02)
        back = ctypes.create_string_buffer(64)
        call("cuCtxSetCurrent", context)
        call("cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(64))
        text = back.raw.decode().strip()
        self.answer({"id": "1", "object": "chat.completion", "created": 0, "model": name, "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}]})
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
FILE = f"""\
project: demo
listen: 127.0.0.1:8080
defaults:
  image: {PYTHON}
  command: [python3, /demo/server.py, "${{PORT}}", "${{MODEL}}", "{MODEL_BYTES}"]
  gpus: [0]
  mounts: ["PLACE:/demo", "{gpu.GPUS}:{gpu.GPUS}:rw"]
models:
  poet: {{idle-timeout: 5m}}
  coder: {{idle-timeout: 5m, aliases: [gpt-4o-mini]}}
  critic: {{idle-timeout: 2s}}
"""


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say what happens and how long it took."""
    print(f"\n── {what}", flush=True)
    begin = time.monotonic()
    yield
    print(f"   {time.monotonic() - begin:.2f} s", flush=True)


def show(text: str) -> None:
    for line in text.strip().splitlines():
        print(f"   {line}", flush=True)


def ask(model: str) -> str:
    """Send a model a request, as a client of OpenAI's does, and return what it answers; says how long that took."""
    begin = time.monotonic()
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    answer = httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=60)
    assert answer.is_success, answer.text
    text = str(answer.json()["choices"][0]["message"]["content"])
    wake = answer.headers.get("X-Kybernate-Wake-Ms")
    woke = f", of which {int(wake)} ms until it was awake" if wake else ""
    print(f"   {model:8} {text:24} {1000 * (time.monotonic() - begin):6.0f} ms{woke}", flush=True)
    return text


class Machine:
    """One machine with a GPU, the agent, and `kybernate up`."""

    def __init__(self, place: Path, gpus: Gpus, agent: NodeAgent, file: str = FILE) -> None:
        self.place, self.gpus, self.agent = place, gpus, agent
        self.file = place / "models.yaml"
        (place / "server.py").write_text(SERVER)
        self.file.write_text(file.replace("PLACE", str(place)))

    def kybernate(self, *words: str) -> str:
        done = subprocess.run(
            [*KYBERNATE, *words], capture_output=True, text=True, check=False, cwd=self.place, timeout=120
        )
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(words)}\n{done.stdout}{done.stderr}{self.log()}")
        return done.stdout

    def up(self) -> None:
        show(self.kybernate("up", "-d", "--agent", self.agent.address))

    def log(self) -> str:
        path = LOGS / "demo/up.log"
        return path.read_text() if path.exists() else ""

    def models(self) -> dict[str, str]:
        return dict(line.split(maxsplit=2)[:2] for line in self.kybernate("models").splitlines()[1:])

    def wait_ready(self, times: int, models: Sequence[str] = MODELS) -> None:
        """Wait until each model was ready so many times."""

        def ready() -> bool:
            log = self.log()
            missing = [name for name in models if log.count(f"{name}: ready at") < times]
            assert not missing, f"{missing}: {log[-2000:]}"
            return True

        eventually(ready, seconds=90)

    def process_of(self, model: str) -> psutil.Process:
        return next(
            one for one in psutil.process_iter(["cmdline"])
            if (one.info["cmdline"] or [])[1:2] == ["/demo/server.py"] and model in one.info["cmdline"]
        )  # fmt: skip

    def reboot(self) -> None:
        """End every process of the node but its registry, as a power cut does, and start containerd and the agent."""
        own = {os.getpid(), *(one.pid for one in psutil.Process().parents())}
        for process in psutil.process_iter(["cmdline", "name"]):
            words = " ".join(process.info["cmdline"] or [])
            of_node = process.info["name"].startswith(OF_NODE) or any(one in words for one in RUN_BY_NODE)
            if of_node and process.pid not in own:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        Containerd().kill()
        gpu.forget_helper()
        Containerd().start()
        Containerd().wait_ready()
        self.agent.start()
        self.agent.wait_ready()


@contextmanager
def own_agent(place: Path) -> Iterator[NodeAgent]:
    """Run an agent in a place of its own."""
    agent = NodeAgent(place)
    agent.start()
    agent.wait_ready()
    yield agent
    agent.stop()


@contextmanager
def machine(
    file: str = FILE,
    size: int = GPU_BYTES,
    run_agent: Callable[[Path], AbstractContextManager[NodeAgent]] = own_agent,
) -> Iterator[Machine]:
    """A machine with a file of models and a pretended GPU of so many bytes."""
    with ExitStack() as stack:
        gpus = gpu.install_driver()
        stack.callback(gpu.remove_driver)
        stack.callback(gpu.forget_helper)
        Gpus.create(gpu.GPUS, count=2, size=size)
        place = stack.enter_context(node_agent.short_place())
        agent = stack.enter_context(run_agent(place))
        os.environ["KYBERNATE_AGENT"] = agent.address
        found = Machine(place, gpus, agent, file)
        try:
            yield found
        finally:
            found.kybernate("down", "--agent", agent.address)
            del os.environ["KYBERNATE_AGENT"]
            for directory in (Config().checkpoint_root / "demo", LOGS, control.LOCKS):
                shutil.rmtree(directory, ignore_errors=True)


def tell_of_one_machine(machine: Machine) -> None:
    """Models of one file behind one address."""
    with told("kybernate up -d: each model loads once, is saved as a template, and put to sleep"):
        machine.up()
        machine.wait_ready(1)
        show(machine.kybernate("models"))
    with told("A request to each, by one address: it wakes, and what has the GPU leaves it"):
        first = {name: ask(name) for name in MODELS}
        assert len(set(first.values())) == len(MODELS)
        ask("gpt-4o-mini")
        ask("poet")
        ask("poet")
    with told("Three clients in parallel: each gets its answer"), ThreadPoolExecutor(3) as clients:
        assert list(clients.map(ask, MODELS)) == [first[name] for name in MODELS]
    with told("critic is asked, and has nothing to do for 2 s: it is suspended, the GPU is free"):
        ask("critic")
        eventually(lambda: machine.models()["critic"] == "asleep", seconds=30)
        eventually(lambda: machine.gpus.used()[0] == 0)
        show(machine.kybernate("models"))
    with told("kybernate sleep --disk coder: its memory is free; a request brings it back from its template"):
        show(machine.kybernate("sleep", "--disk", "coder"))
        assert ask("coder") == first["coder"]
    with told("kill -9 of poet's program: the next request gets its answer from the template"):
        machine.process_of("poet").kill()
        assert ask("poet") == first["poet"]
    with told("A power cut: every process of the node is killed; containerd, agent and kybernate up start again"):
        machine.reboot()
        machine.up()
        assert {name: ask(name) for name in MODELS} == first
    with told("The web page shows all of it: kybernate page prints a link"), page(machine) as socket:
        show(machine.kybernate("page", "--socket", str(socket)))


@contextmanager
def page(machine: Machine) -> Iterator[Path]:
    socket = machine.place / "page.sock"
    command = [*KYBERNATE, "page", "serve", "--agent", machine.agent.address, "--socket", str(socket), "--proxy", URL]
    command += ["--session-key", str(machine.place / "page.key"), "--listen", PAGE]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(socket.exists, seconds=40)
            yield socket
        finally:
            process.terminate()


def tell_of_a_pod(cri: Cri) -> None:
    """A pod that is checkpointed, removed, and comes back as another pod."""
    checkpoint = Path("/var/lib/kybernate/checkpoints/default/counter")
    with told("A pod is started with the runtime class kybernate, and a container that counts"):
        first = cri.run_pod()
        container = cri.run(first, "counter", COUNTER)
        show_log(cri, first, 3)
    with told("kybernate checkpoint --exit: memory, processes, files and log are in an image; the pod is deleted"):
        show(run(["kybernate", "checkpoint", container, checkpoint.name, "--exit"]))
        last = cri.log(first, "counter")[-1]
        cri.remove_pod(first)
    with told("A new pod with kybernate.io/restore-from resumes where the counter stopped"):
        second = cri.run_pod(annotations={"kybernate.io/restore-from": checkpoint.name})
        cri.run(second, "counter", ["/its/own/command/never/runs"])
        show_log(cri, second, 3)
    following = cri.log(second, "counter")[0]
    assert int(following) == int(last) + 1, f"{following!r} does not follow {last!r}"
    cri.remove_pod(second)
    shutil.rmtree(checkpoint)


def show_log(cri: Cri, pod: Pod, lines: int) -> None:
    eventually(lambda: len(cri.log(pod, "counter")) >= lines, seconds=60)
    show("\n".join(cri.log(pod, "counter")[:lines]))


def tell_of_the_agent() -> None:
    """A container whose checkpoint is an operation of the node agent, which is killed meanwhile."""
    ctr = Ctr()
    again = ctr.new_id("again")
    with node_agent.short_place() as place, ctr.running(*COUNTER) as id:
        image = place / "image"
        agent = node_agent.NodeAgent(place)
        agent.start()
        agent.wait_ready()
        os.environ["KYBERNATE_AGENT"] = agent.address
        with told("A checkpoint is an operation of the agent, which is killed with SIGKILL and started again"):
            operation = run(["kybernate", "checkpoint", id, str(image), "--exit", "--no-wait"]).strip()
            agent.stop(signal.SIGKILL)
            agent.start()
            agent.wait_ready()
            show(run(["kybernate", "wait", operation]))
        with told("The container comes back by the agent"):
            show(run(["kybernate", "restore", str(image), "-d", "--name", again]))
            show(run(["kybernate", "ops"]))
        ctr.remove(again)
        agent.stop()
        del os.environ["KYBERNATE_AGENT"]


def main() -> int:
    begin = time.monotonic()
    show(run(["containerd", "--version"]) + run(["containerd-shim-kybernate-v1", "-v"]) + run(["criu", "--version"]))
    print(f"\n═══ Three models of {MODEL_BYTES // MIB} MiB, and a GPU (a pretended one) with {GPU_BYTES // MIB} MiB")
    with machine() as one:
        tell_of_one_machine(one)
    print("\n═══ Without a file: pods and containers", flush=True)
    with Cri() as cri:
        tell_of_a_pod(cri)
    tell_of_the_agent()
    print(f"\nDone in {time.monotonic() - begin:.0f} s: all came back where they were, and nothing is left of it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
