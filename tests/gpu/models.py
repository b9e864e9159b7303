"""Models behind one address on one real GPU: `tests/gpu/serve`, by `kybernate up`, under requests at random times.

Needs root and the kit with `--extras agent,proxy` (python -m tests.gpu.kit). The transformers of
tests/gpu/model_program.py are more than the GPU holds. Requests come by a Poisson process; each answer must be the one
that the model gave before, by the same start of its program, with the same weights. Then all programs of the node are
ended as by a reboot, and all models must answer again without having loaded. Results: DIRECTORY/models-WAY.json,
requests-WAY.jsonl, page-WAY.jsonl.gz with what the web page was told (`tests.gpu.page_record`), and the logs.

`--way stop-start` serves the same requests by starting a model's program for them and stopping the one before, with
its weights in a file that the machine has in memory. `--way driver` is `kybernate up` without the arena.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.gpu import machine as machines
from tests.gpu.host_memory import GIB, touch_what_is_there, used
from tests.gpu.machine import CHECKOUT, DRIVER, Machine
from tests.gpu.page_record import recording
from tests.gpu.scenarios import await_true

PROGRAM = Path(__file__).with_name("model_program.py")
LISTEN = 18080
FIRST_PORT = 18000
QUESTIONS = 4
ANSWER_SECONDS = 120.0
LOAD_SECONDS = 400.0
START_SECONDS = 180.0  # until the agent answers
BACK_SECONDS = 200.0
TELL_SECONDS = 15.0
# Memory of the GPU that another program has, so that models do not all fit into a large one.
BALLAST = """
import sys, time, torch
gib, left = map(int, sys.argv[1:])
size = max(0, torch.cuda.mem_get_info()[0] - (left << 30)) if left else gib << 30
held = torch.empty(size, dtype=torch.uint8, device="cuda")
print(f"holds {size >> 20} MiB", flush=True)
time.sleep(86400)
"""
CRI = """
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost:5000/pause:latest"
enable_cdi = true
restrict_oom_score_adj = true  # root cannot lower it there
cdi_spec_dirs = ["{root}/cdi"]
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "kybernate"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kybernate]
runtime_type = "io.containerd.kybernate.v1"
pod_annotations = ["kybernate.io/*"]
container_annotations = ["kybernate.io/*"]
"""
SEATS = """
[seats.configuration]
share = "vram"
profiles = [{ name = "gpu-1x-seat", resource = "kyb.ai/gpu-1x-seat", groupSize = 1, seatsPerGroup = 16 }]
[seats.configuration.rules]
ramLow = "2Gi"
ramHigh = "3Gi"
"""


@dataclass
class Answer:
    """A request's fate. Times are seconds since the first one was due; `wake_ms` is what the proxy's header says."""

    model: str
    question: int
    due: float
    first: float = 0.0
    end: float = 0.0
    status: int = 0
    wake_ms: str = ""
    loaded: str = ""
    weights: int = 0
    text: str = ""
    error: str = ""


Ask = Callable[[Answer, float], None]  # sends a request, by the time at which the first one was due
Tell = Callable[[list[Answer]], object]


@dataclass
class Platform:
    """The node's agent and `kybernate up` on a machine."""

    machine: Machine
    out: Path
    file: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def spawn(self, name: str, *argv: str) -> None:
        with (self.out / f"{name}.log").open("ab") as log:
            self.running.append(
                subprocess.Popen(argv, env=self.machine.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )

    def start(self) -> None:
        """Start agent and `up`; does not wait for the models."""
        settings = self.machine.root / "agent.toml"
        self.spawn("agent", "kybernate", "agent", "--config", str(settings))
        end = time.monotonic() + START_SECONDS
        while subprocess.run(
            ["kybernate", "ps", "--agent", self.address], env=self.machine.environment, capture_output=True, check=False
        ).returncode:
            assert time.monotonic() < end, "the agent does not answer"
            time.sleep(0.2)
        self.spawn("up", "kybernate", "up", str(self.file), "--agent", self.address)

    @property
    def address(self) -> str:
        return f"unix:{self.machine.root}/agent/agent.sock"

    def said(self) -> str:
        path = self.out / "up.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def die(self) -> None:
        """End everything as a reboot does: agent, `up`, all containers, the helper, containerd."""
        for one in self.running:
            one.send_signal(signal.SIGKILL)
            one.wait()
        self.running.clear()
        self.machine.containerd.kill()
        self.machine.containerd.wait()
        machines.end_containers()
        machines.end_helper()

    def revive(self) -> None:
        """Start containerd, the agent and `up` again."""
        self.machine.start_containerd()
        self.start()


def main(argv: Sequence[str]) -> int:
    """Return 0 when no request has failed and all models came back."""
    arguments = _arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for before in arguments.out.glob("*.log"):
        before.unlink()
    names = [f"model-{number}" for number in range(arguments.models)]
    if arguments.way == "stop-start":
        with tuned(arguments) as environment:
            served = StopStart(names, arguments, environment)
            try:
                served.prepare()
                answers = load(
                    names, arguments, served.ask, partial(report, arguments, facts={"loads": served.loads}, ended=False)
                )
            finally:
                served.end()
        return report(arguments, answers, {"loads": served.loads})
    return _by_up(names, arguments)


def _by_up(names: list[str], arguments: argparse.Namespace) -> int:
    root = arguments.root or machines.filesystem_for_overlays()
    sizes = [str(arguments.ballast), str(arguments.leave)]
    has_ballast = sizes != ["0", "0"] and not arguments.pretended
    ballast = subprocess.Popen([sys.executable, "-c", BALLAST, *sizes]) if has_ballast else None
    platform = prepared(root, names, arguments)
    facts: dict[str, object] = {"room_gib": arguments.leave} if arguments.leave else {}
    page = arguments.out / f"page-{arguments.way}.jsonl.gz"
    try:
        with recording(platform.address, page, platform.machine.environment):
            began = time.monotonic()
            platform.start()
            await_true(
                lambda: all(f"{name}: ready at" in platform.said() for name in names),
                "all models are ready",
                seconds=LOAD_SECONDS,
                shown=platform.said,
            )
            facts["ready_seconds"] = round(time.monotonic() - began, 1)
            print(f"all are ready after {facts['ready_seconds']} s", flush=True)
            show(platform, "kybernate", "ps")
            answers = load(names, arguments, ask_proxy, partial(report, arguments, facts=facts, ended=False))
            show(platform, "kybernate", "ps")
            loaded = {one.model: one.loaded for one in answers if one.loaded}
            status = report(arguments, answers, facts)  # a reboot that fails does not take it away
            if arguments.reboot:
                facts |= reboot(platform, names, loaded)
    except BaseException:
        print(platform.said()[-6000:], platform.machine.log(), file=sys.stderr)
        raise
    finally:
        finish(platform, arguments)
        if ballast is not None:
            ballast.kill()
            ballast.wait()
    return report(arguments, answers, facts) if arguments.reboot else status


def reboot(platform: Platform, names: list[str], loaded: dict[str, str]) -> dict[str, object]:
    """End all programs of the node, start them again, and ask each model until it answers."""
    platform.die()
    began = time.monotonic()
    platform.revive()
    back: dict[str, float] = {}
    while len(back) < len(names):
        assert time.monotonic() < began + BACK_SECONDS, f"only {sorted(back)} came back\n{platform.said()[-4000:]}"
        for name in names:
            if name not in back:
                answer = Answer(name, 0, 0.0)
                ask_proxy(answer, time.monotonic())
                if answer.status == 200 and not answer.error:
                    back[name] = round(time.monotonic() - began, 1)
                    same = answer.loaded == loaded.get(name)
                    print(f"{name} answers after {back[name]} s, {'without loading' if same else 'LOADED AGAIN'}")
                    assert same, f"{name} was loaded again\n{platform.said()[-4000:]}"
        time.sleep(0.5)
    return {"back_seconds": back}


# -- requests


def load(names: list[str], arguments: argparse.Namespace, ask: Ask, tell: Tell) -> list[Answer]:
    """Send requests at random times, each from a thread of its own, and return what became of them.

    `tell` gets those that have ended, every few seconds, so that a run that is cut short leaves its figures.
    """
    numbers = random.Random(arguments.seed)
    answers, threads, due = [], [], 0.0
    while (due := due + numbers.expovariate(arguments.rate)) < arguments.seconds:
        answers.append(Answer(numbers.choice(names), numbers.randrange(QUESTIONS), due))
    began = told = time.monotonic()
    for answer in answers:
        time.sleep(max(0.0, began + answer.due - time.monotonic()))
        if time.monotonic() > told + TELL_SECONDS:
            tell([one for one in answers if one.end])
            told = time.monotonic()
        thread = threading.Thread(target=ask, args=(answer, began), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(ANSWER_SECONDS)
    return answers


def ask_proxy(answer: Answer, began: float) -> None:
    ask_at(LISTEN, answer, began)


def ask_at(port: int, answer: Answer, began: float) -> None:
    """Send one request and read its stream."""
    messages = [{"role": "user", "content": f"question {answer.question}"}]
    body = {"model": answer.model, "stream": True, "messages": messages}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer.status, answer.wake_ms = response.status, response.headers.get("x-kybernate-wake-ms", "")
        if response.status != 200:
            answer.error = response.read(500).decode(errors="replace")
            return
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            answer.first = answer.first or time.monotonic() - began
            event = json.loads(line[6:])
            answer.text += "".join(one["delta"].get("content", "") for one in event["choices"])
            answer.loaded, answer.weights = event.get("loaded", ""), event.get("weights", 0)
        if not answer.loaded:
            answer.error = "the stream has ended before the answer"
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.end = time.monotonic() - began
        connection.close()


class StopStart:
    """Serves by one program at a time: it is stopped when another model is asked for, whose program is started."""

    def __init__(self, names: list[str], arguments: argparse.Namespace, environment: dict[str, str]) -> None:
        self._names, self._arguments, self._environment = names, arguments, environment
        self._running: tuple[str, subprocess.Popen[bytes]] | None = None
        self._asked: queue.Queue[tuple[Answer, float, threading.Event]] = queue.Queue()
        self.loads: list[float] = []

    def prepare(self) -> None:
        """Have each model's weights in its file, and the file in memory."""
        for name in self._names:
            self._switch(name)
        self.loads.clear()
        threading.Thread(target=self._serve, daemon=True).start()

    def ask(self, answer: Answer, began: float) -> None:
        done = threading.Event()
        self._asked.put((answer, began, done))
        done.wait(ANSWER_SECONDS * 3)

    def end(self) -> None:
        if self._running is not None:
            self._running[1].kill()
            self._running[1].wait()

    def _serve(self) -> None:
        """Serve all that wait for the model that runs before the next one is started."""
        waiting: list[tuple[Answer, float, threading.Event]] = []
        while True:
            waiting.append(self._asked.get() if not waiting else waiting.pop(0))
            while not self._asked.empty():
                waiting.append(self._asked.get())
            name = waiting[0][0].model
            if self._running is None or self._running[0] != name:
                self._switch(name)
            for one in [one for one in waiting if one[0].model == name]:
                waiting.remove(one)
                ask_at(FIRST_PORT, one[0], one[1])
                one[2].set()

    def _switch(self, name: str) -> None:
        self.end()
        began = time.monotonic()
        weights = self._arguments.weights / f"{name}.pt"
        device = "pretended" if self._arguments.pretended else "cuda"
        with (self._arguments.out / f"{name}.log").open("ab") as log:
            program = subprocess.Popen(
                [sys.executable, PROGRAM, name, str(self._arguments.gib), str(FIRST_PORT), device],
                env={**self._environment, "MODEL_WEIGHTS": str(weights)},
                stdout=log,
                stderr=log,
            )
        self._running = name, program
        await_true(
            lambda: healthy(FIRST_PORT),
            f"{name} answers",
            seconds=LOAD_SECONDS,
            shown=lambda: f"its program: {program.poll()}",
        )
        self.loads.append(round(time.monotonic() - began, 2))


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# -- the machine


def prepared(root: Path, names: list[str], arguments: argparse.Namespace) -> Platform:
    """Start containerd with CRI, and write what agent and `up` read."""
    machine = Machine.start(root, arguments.kit, cri=CRI.format(root=root))
    machine.import_image("pause", pause(root), "k8s.io", Cmd=["/pause"])
    describe_gpus(root, arguments)
    for name in ("checkpoints", "agent"):
        (root / name).mkdir(exist_ok=True)
    arena = f'arena = "{arguments.arena}GiB"\narena_containers = "all"\n' if arguments.way == "kybernate" else ""
    machine.configure(
        f'checkpoint_root = "{root}/checkpoints"\nlog_file = "{arguments.out.absolute()}/shim.log"\n'
        f"[gpu]\nvisible_devices_env = {str(bool(arguments.pretended)).lower()}\n{arena}"
    )
    if arguments.way == "kybernate" and not arguments.pretended:
        touch_what_is_there(arguments.arena * GIB)
    (root / "agent.toml").write_text(
        f'state_directory = "{root}/agent/state"\nsocket = "{root}/agent/agent.sock"\n'
        f'registry = "sqlite:///{root}/agent/registry.db"\n[operations]\nper_disk = 2\n{SEATS}'
    )
    device = "pretended" if arguments.pretended else "cuda"
    command = json.dumps([sys.executable, str(PROGRAM), "${MODEL}", str(arguments.gib), "${PORT}", device])
    libraries = [str(path) for path in (DRIVER / "lib64", DRIVER / "lib") if path.is_dir()]
    if arguments.pretended:
        libraries = [str(arguments.pretended)]
    mounts = [
        str(CHECKOUT),
        *([f"{arguments.pretended}", "/run/fake-cuda:/run/fake-cuda:rw"] if arguments.pretended else []),
    ]
    lines = [
        "project: gpu",
        f"listen: 127.0.0.1:{LISTEN}",
        "defaults:",
        "  gpus: [0]",
        "  start-timeout: 5m",
        f"  command: {command}",
        f"  mounts: {json.dumps(mounts)}",
        f"  env: {{LD_LIBRARY_PATH: '{':'.join(libraries)}', HOME: /tmp}}",
        "models:",
        *(f"  {name}: {{port: {FIRST_PORT + number}}}" for number, name in enumerate(names)),
    ]
    file = root / "models.yaml"
    file.write_text("\n".join(lines) + "\n")
    return Platform(machine, arguments.out, file)


def describe_gpus(root: Path, arguments: argparse.Namespace) -> None:
    """Write a CDI specification of the first GPU: its device nodes, for programs that see the machine's own driver."""
    nodes = [] if arguments.pretended else [machines.gpu_nodes()[0], "/dev/nvidiactl", "/dev/nvidia-uvm"]
    edits: dict[str, object] = {"env": ["NVIDIA_VISIBLE_DEVICES=0"], "deviceNodes": [{"path": path} for path in nodes]}
    if not nodes:
        del edits["deviceNodes"]
    (root / "cdi").mkdir(exist_ok=True)
    (root / "cdi/nvidia.json").write_text(
        json.dumps(
            {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": edits}]}
        )
    )


def pause(root: Path) -> bytes:
    """Return the layer of the image of a pod's own container, with a program that is compiled here."""
    source, program = root / "pause.c", root / "pause"
    source.write_text("#include <unistd.h>\nint main(void) { for (;;) pause(); }\n")
    subprocess.run(["cc", "-static", "-O1", "-o", program, source], check=True)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(program, "pause")
    return content.getvalue()


@contextmanager
def tuned(arguments: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield the environment of programs without a container; the weights' files are removed afterwards."""
    arguments.weights.mkdir(parents=True, exist_ok=True)
    libraries = [str(path) for path in (DRIVER / "lib64", DRIVER / "lib") if path.is_dir()]
    if arguments.pretended:
        libraries = [str(arguments.pretended)]
    try:
        yield {**os.environ, "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])}
    finally:
        shutil.rmtree(arguments.weights, ignore_errors=True)


def show(platform: Platform, *argv: str) -> None:
    print(platform.machine(*argv, "--agent", platform.address, status=None), flush=True)


def finish(platform: Platform, arguments: argparse.Namespace) -> None:
    """Remove all that was started."""
    for one in platform.running:
        one.terminate()
    platform.machine("kybernate", "down", str(platform.file), status=None)
    for one in platform.running:
        with suppress(subprocess.TimeoutExpired):
            one.wait(30)
    if not arguments.keep:
        platform.machine.stop()
        machines.remove(platform.machine.root)


# -- results


def report(
    arguments: argparse.Namespace, answers: list[Answer], facts: dict[str, object], *, ended: bool = True
) -> int:
    """Write what was seen, and print it where the requests have `ended`."""
    failed = [one for one in answers if one.status != 200 or one.error or not one.first]
    wrong = [
        *differing(answers, lambda one: (one.model, one.question), "text"),
        *differing(answers, by_model, "weights"),
    ]
    if arguments.way != "stop-start":
        wrong += differing(answers, by_model, "loaded")
    waits = sorted(one.first - one.due for one in answers if one.first)
    slept = sorted(float(one.wake_ms) / 1000 for one in answers if one.wake_ms)
    result = {
        "way": arguments.way,
        "ended": ended,
        "models": arguments.models,
        "gib": arguments.gib,
        "requests": len(answers),
        "failed": len(failed),
        "wrong": wrong,
        "first_byte_p50": quantile(waits, 0.5),
        "first_byte_p99": quantile(waits, 0.99),
        "first_byte_worst": quantile(waits, 1.0),
        "woke": len(slept),
        "wake_p50": quantile(slept, 0.5),
        "wake_p99": quantile(slept, 0.99),
        "by_model": Counter(one.model for one in answers),
        "memory_gib": round(used() / GIB, 1),
        **facts,
    }
    with (arguments.out / f"requests-{arguments.way}.jsonl").open("w") as lines:
        lines.writelines(json.dumps(asdict(one)) + "\n" for one in answers)
    (arguments.out / f"models-{arguments.way}.json").write_text(json.dumps(result, indent=1) + "\n")
    if ended:
        print(json.dumps(result), flush=True)
        for one in failed[:5]:
            print(f"FAILED {one}", flush=True)
    return 1 if failed or wrong else 0


def by_model(answer: Answer) -> object:
    return answer.model


def differing(answers: list[Answer], key: Callable[[Answer], object], what: str) -> list[str]:
    """Return what answers of one key do not have in common."""
    seen: dict[object, object] = {}
    found = []
    for one in answers:
        if one.status == 200 and not one.error:
            expected = seen.setdefault(key(one), getattr(one, what))
            if getattr(one, what) != expected:
                found.append(f"{what} of {one.model} at {one.due:.1f} s: {getattr(one, what)!r}, before {expected!r}")
    return found


def quantile(values: Sequence[float], share: float) -> float:
    return round(values[min(len(values) - 1, int(share * len(values)))], 3) if values else 0.0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/serve", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kit", type=Path, default=CHECKOUT / "build/gpu-kit")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "build/gpu")
    parser.add_argument("--root", type=Path, help="the node's directory, removed afterwards")
    parser.add_argument("--way", choices=("kybernate", "driver", "stop-start"), default="kybernate")
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--gib", type=float, default=14.0, help="weights of each model (14)")
    parser.add_argument("--arena", type=int, default=88, metavar="GIB", help="of the node's memory (88)")
    parser.add_argument("--ballast", type=int, default=0, metavar="GIB", help="of the GPU that others have (0)")
    parser.add_argument(
        "--leave", type=int, default=0, metavar="GIB", help="of the GPU, whatever it has: others have the rest"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of requests (300)")
    parser.add_argument("--rate", type=float, default=0.4, help="requests a second, of all models (0.4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--reboot", action="store_true", help="end all programs of the node afterwards, as a reboot does"
    )
    parser.add_argument("--weights", type=Path, default=Path("/dev/shm/kybernate-weights"), help="of stop-start")
    parser.add_argument("--keep", action="store_true", help="leave the node as it is")
    parser.add_argument("--pretended", type=Path, metavar="LIBRARIES", help="rehearse on the pretended driver in there")
    return parser.parse_args(argv)
