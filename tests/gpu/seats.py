"""Seats on real GPUs: rotation, residue, a notebook, and groups that overlap. They need a kit with `--extras agent`.

Each scenario writes its figures into NAME.json of the run's folder again and again, so that a run that is cut short
leaves what it has measured. The programs wait for a line before each step (tests/gpu/payload.py), so that it is known
who uses a GPU and when.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.client.agent import Agent, Operation
from kybernate.messages import agent_pb2 as wire
from kybernate.node.words import word
from kybernate_shim.arena.memory import FOLDER, Memory
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_client import cuda_helper
from tests.gpu.machine import gpu_nodes
from tests.gpu.scenarios import Bench, Container, await_true, container
from tests.gpu.waking import MORE_MIB, asked
from tests.gpu.zoo.held import by_processes, least, resident_kib

PROGRAMS, SWITCHES = 6, 100
CYCLES, SMALL_MIB = 1000, 256
CYCLES_SECONDS = 1300.0
LOOKS = (1, 2, 10, 100, 250, 500, 750)
REHEARSED = 25  # a rehearsal does so much less of everything
NOTEBOOK_MIB = 8192
CELLS = 20
ROUNDS = 20
TELL_SECONDS = 5.0
STEP_SECONDS = 60
LOOK_SECONDS = 0.1  # between two looks at who holds memory
RULES = """
[seats.configuration.rules]
minimumResidency = 0.1
yieldAfter = 0.1
idleAfter = 0
reserve = "{reserve}"
ramLow = 0
ramHigh = 0
"""
ONE_GPU = """
[seats.configuration]
profiles = [{ name = "one", resource = "kyb.ai/one", groupSize = 1, seatsPerGroup = 16 }]
gpuTopology.groups = [{ name = "G0", gpus = [0] }]
"""
TWO_GPUS = """
[seats.configuration]
profiles = [
  { name = "one", resource = "kyb.ai/one", groupSize = 1, seatsPerGroup = 4 },
  { name = "two", resource = "kyb.ai/two", groupSize = 2, seatsPerGroup = 2 },
]
gpuTopology.groups = [
  { name = "G0", gpus = [0] }, { name = "G1", gpus = [1] }, { name = "G01", gpus = [0, 1] },
]
"""
SETTINGS = """
state_directory = "{place}/state"
socket = "{socket}"
registry = "sqlite:///{place}/registry.db"
[seats]
device_plugins = "{place}/plugins"
pod_resources = "{place}/pods.sock"
"""


@dataclass
class Figures:
    """What a scenario has measured, in a file that is written every few seconds."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    _written: float = 0.0

    def tell(self, *, now: bool = False, **values: object) -> None:
        self.values |= values
        if now or time.monotonic() > self._written + TELL_SECONDS:
            self._written = time.monotonic()
            self.path.write_text(json.dumps(self.values, indent=1) + "\n")


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, P99 and worst, in seconds; nothing of nothing."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    at = {"median": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) for name, share in at.items()}


def times(bench: Bench, count: int) -> int:
    return count if bench.pretended is None else max(4, count // REHEARSED)


@dataclass
class Asked:
    """A container whose program does a step for each line that it is sent."""

    container: Container
    ask: Callable[[], None]

    @property
    def id(self) -> str:
        return self.container.id

    def step(self) -> float:
        """Have it do a step, and return the seconds until that is known. A wrong sum fails."""
        before, began = self.container.steps(), time.monotonic()
        self.ask()
        until = began + STEP_SECONDS
        while self.container.steps() <= before:
            assert time.monotonic() < until, f"{self.id}: no step\n{self.container.log.read_text()[-2000:]}"
            time.sleep(0.005)
        return time.monotonic() - began


def seats_rotate(bench: Bench) -> None:
    """Programs of --mib each, of which the arbiter lets one onto the GPU, are woken in random order."""
    figures = Figures(
        bench.out / "seats_rotate.json", {"mib": bench.mib, "programs": PROGRAMS, "of": times(bench, SWITCHES)}
    )
    numbers = random.Random(1)
    wakes: list[float] = []
    computing: list[float] = []
    steps: dict[str, list[float]] = {}
    with agent_with_seats(bench, ONE_GPU) as agent, ExitStack() as stack:
        began = time.monotonic()
        programs = [stack.enter_context(_seated(bench, f"rotates-{number}of", "one")) for number in range(PROGRAMS)]
        figures.tell(now=True, started_seconds=round(time.monotonic() - began, 1))
        print(f"  all {PROGRAMS} have computed after {time.monotonic() - began:.0f} s", flush=True)
        for number in range(PROGRAMS + times(bench, SWITCHES)):
            away = [one for one in programs if status(agent, one.id) != "active"]
            one = programs[number] if number < PROGRAMS else numbers.choice(away)
            if number == PROGRAMS:  # each has been away and back: what is made once is made
                wakes, computing, steps = [], [], {}
            began = time.monotonic()
            operation = agent.wake(one.id)
            operation.result(STEP_SECONDS)
            wakes.append(time.monotonic() - began)
            one.step()
            computing.append(time.monotonic() - began)
            for seconds, name in _steps(operation):
                steps.setdefault(name, []).append(seconds)
            figures.tell(
                switches=max(0, number + 1 - PROGRAMS), request_to_awake=spread(wakes),
                request_to_computed=spread(computing), by_step={name: spread(found) for name, found in steps.items()},
                wakes=[round(one, 3) for one in wakes],
            )  # fmt: skip
            become(agent, {other.id: "active" if other is one else "suspended" for other in programs})
        swaps = [one.state for one in agent.operations(limit=500) if one.state.verb == "swap"]
        figures.tell(
            now=True,
            swaps=len(swaps),
            swap_seconds=spread([_seconds(one.ended) - _seconds(one.started) for one in swaps if one.ended.seconds]),
            sums="all as at first",
            steps=[one.container.steps()[0] for one in programs],
        )
    bench.rows.append(("seats_rotate", "request to computed, median", spread(computing)["median"], bench.mib << 20))
    bench.rows.append(("seats_rotate", "request to computed, worst", spread(computing)["worst"], bench.mib << 20))
    print(f"  {json.dumps(figures.values)}", flush=True)


def suspends_leave_nothing(bench: Bench) -> None:
    """One small program is suspended and resumed CYCLES times; what is held is compared with after the first time.

    It ends before where CYCLES_SECONDS are over.
    """
    figures = Figures(
        bench.out / "suspends_leave_nothing.json", {"mib": min(bench.mib, SMALL_MIB), "of": times(bench, CYCLES)}
    )
    suspends: list[float] = []
    resumes: list[float] = []
    name = "leaves-nothing"
    with agent_with_seats(bench, ONE_GPU) as agent, _seated(bench, name, "one", mib=SMALL_MIB) as one:
        held: dict[str, dict[str, Any]] = {}
        until = time.monotonic() + CYCLES_SECONDS
        for number in range(1, times(bench, CYCLES) + 1):
            late = time.monotonic() > until
            looks = late or number in (*LOOKS, times(bench, CYCLES))
            began = time.monotonic()
            agent.suspend(name).result(STEP_SECONDS)
            suspends.append(time.monotonic() - began)
            if looks:
                held[f"suspended {number}"] = _held(bench, agent, name)
            began = time.monotonic()
            agent.resume(name).result(STEP_SECONDS)
            resumes.append(time.monotonic() - began)
            if looks or number % 10 == 0:
                one.step()
            if looks:
                held[f"computes {number}"] = now = _held(bench, agent, name)
                more = {
                    state: _more(held[f"{state} 1"], held[f"{state} {number}"]) for state in ("suspended", "computes")
                }
                figures.tell(now=True, held=held, more_than_after_the_first=more)
                print(f"  {number}: {json.dumps(now)}", flush=True)
            figures.tell(cycles=number, suspend=spread(suspends), resume=spread(resumes))
            if late:
                break
        figures.tell(now=True)
    bench.rows.append((name, "suspend, median", spread(suspends)["median"], SMALL_MIB << 20))
    bench.rows.append((name, "resume, median", spread(resumes)["median"], SMALL_MIB << 20))
    print(f"  {json.dumps(figures.values)}", flush=True)


def notebook_wakes(bench: Bench) -> None:
    """Cells of an IPython kernel that is suspended for another program run by their use of the GPU."""
    site = bench.machine.root / "site"
    sys.path.append(str(site))
    from jupyter_client.blocking.client import BlockingKernelClient  # of the kit, where it has it

    figures = Figures(
        bench.out / "notebook_wakes.json", {"of": times(bench, CELLS), "mib": min(bench.mib, NOTEBOOK_MIB)}
    )
    name = "notebook"
    place = bench.images / f"{name}.d"
    place.mkdir()
    ports: dict[str, Any] = {
        f"{kind}_port": number for number, kind in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)
    }
    connection: Any = {"transport": "ipc", "key": "key", "signature_scheme": "hmac-sha256", **ports}
    (place / "connection.json").write_text(json.dumps({**connection, "ip": "/notebook/kernel"}))
    flags = [
        "--mount", f"type=bind,src={place},dst=/notebook,options=rbind:rw",
        "--mount", f"type=bind,src={site},dst={site},options=rbind:ro", "--env", f"PYTHONPATH={site}",
        *_seat(bench, "one", min(bench.mib, NOTEBOOK_MIB)),
    ]  # fmt: skip
    kernel = [sys.executable, "-m", "ipykernel_launcher", "-f", "/notebook/connection.json"]
    first, cell = _cells(bench)
    with (
        agent_with_seats(bench, ONE_GPU) as agent,
        _seated(bench, "neighbour", "one", mib=NOTEBOOK_MIB) as other,
        container(bench, name, *kernel, programs=0, flags=flags) as notebook,
    ):
        client = BlockingKernelClient()
        client.load_connection_info({**connection, "ip": str(place / "kernel")})
        client.start_channels(hb=False)  # it would count as dead while it starts
        client.wait_for_ready(timeout=60)

        def run(code: str) -> tuple[str, float]:
            began, said = time.monotonic(), []
            reply = client.execute_interactive(
                code, timeout=STEP_SECONDS, output_hook=lambda message: said.append(_said(message))
            )
            assert reply["content"]["status"] == "ok", (reply["content"], notebook.log.read_text()[-2000:])
            return "".join(said).strip(), time.monotonic() - began

        expected, took = run(first)
        figures.tell(now=True, first_cell_seconds=round(took, 3))
        used: list[float] = []
        plain: list[float] = []
        for number in range(times(bench, CELLS)):
            agent.wake(other.id).result(STEP_SECONDS)
            other.step()
            await_true(lambda: status(agent, name) == "suspended", f"{name} is suspended", shown=notebook.log.read_text)
            said, took = run(f"{number} + 1")
            plain.append(took)
            assert said == str(number + 1), said
            assert status(agent, name) == "suspended", "a cell without the GPU has woken the notebook"
            said, took = run(cell)
            used.append(took)
            assert said == expected, f"{said}, and {expected} before"
            figures.tell(
                cells=number + 1, use_to_answer=spread(used), cell_without_gpu=spread(plain),
                all=[round(one, 3) for one in used], results="all as at first",
            )  # fmt: skip
        figures.tell(now=True)
        client.stop_channels()
    bench.rows.append((name, "cell to its answer, median", spread(used)["median"], 0))
    print(f"  {json.dumps(figures.values)}", flush=True)


def _cells(bench: Bench) -> tuple[str, str]:
    """Return a cell that gets memory of the GPU, and one that prints a sum of it; both print the same."""
    if not bench.pretended:
        get = f"import torch; x = torch.arange({min(bench.mib, NOTEBOOK_MIB)} << 17, dtype=torch.int64, device='cuda')"
        return f"{get}; print(int(x.sum()))", "x += 1; x -= 1; print(int(x.sum()))"
    get = f"import sys; sys.path.append('{bench.pretended}'); from array import array; from computes import Gpu"
    read = "gpu.use_in_this_thread(); print(len(gpu.advance()))"
    return f"{get}; gpu = Gpu(0, array('I', range(1 << 18))); {read}", read


def _said(message: dict[str, Any]) -> str:
    content = message["content"]
    return str(content.get("text", "") or content.get("data", {}).get("text/plain", ""))


def seats_of_two_gpus(bench: Bench) -> None:
    """Seats of G0, G1 and G01: those of one GPU are active together, and make room together for the one of both."""
    assert len(gpu_nodes()) > 1 or bench.pretended, "needs two GPUs"
    figures = Figures(bench.out / "seats_of_two_gpus.json", {"mib": bench.mib, "of": times(bench, ROUNDS)})
    wakes: dict[str, list[float]] = {"wide": [], "one": [], "other": []}
    with agent_with_seats(bench, TWO_GPUS) as agent, ExitStack() as stack:
        singles = [
            stack.enter_context(_seated(bench, name, "one", gpus=(number,)))
            for number, name in enumerate(("single-zero", "single-one"))
        ]
        wide = stack.enter_context(_seated(bench, "both-of-them", "two", gpus=(0, 1)))
        watch = stack.enter_context(watching([*(one.id for one in singles), wide.id]))
        seen = {one.container: one.group for one in agent.seats()}
        assert [seen[one.id] for one in (*singles, wide)] == ["G0", "G1", "G01"], seen
        for number in range(times(bench, ROUNDS)):
            for one, key in zip(singles, ("one", "other"), strict=True):
                began = time.monotonic()
                agent.wake(one.id).result(STEP_SECONDS)
                one.step()
                wakes[key].append(time.monotonic() - began)
                become(agent, {one.id: "active", wide.id: "suspended"})
            become(agent, {one.id: "active" for one in singles})  # together
            for one in singles:
                one.step()
            began = time.monotonic()
            agent.wake(wide.id).result(STEP_SECONDS)
            wide.step()
            wakes["wide"].append(time.monotonic() - began)
            become(agent, {wide.id: "active", **{one.id: "suspended" for one in singles}})
            figures.tell(
                rounds=number + 1, wide_awake=spread(wakes["wide"]), first_single_awake=spread(wakes["one"]),
                second_single_awake=spread(wakes["other"]), watched=watch.told(),
            )  # fmt: skip
        swaps = [one.state for one in agent.operations(limit=500) if one.state.verb == "swap"]
        broken = [one for one in watch.together if not any(_runs(swap, one[0]) for swap in swaps)]
        figures.tell(now=True, watched=watch.told(), together_outside_of_swaps=broken[:20], swaps=len(swaps))
        assert not broken, f"held memory of one GPU together: {broken[:5]}"
    bench.rows.append(("seats_of_two_gpus", "both GPUs, request to computed", spread(wakes["wide"])["median"], 0))
    print(f"  {json.dumps(figures.values)}", flush=True)


# -- what holds memory of the GPUs


@dataclass
class Watch:
    """The times at which several containers held memory of one GPU, by the driver's own account of processes."""

    names: Sequence[str]
    together: list[tuple[float, list[str]]] = field(default_factory=list)
    looks: int = 0
    held: int = 0  # looks in which some container held memory
    ended: threading.Event = field(default_factory=threading.Event)

    def told(self) -> dict[str, int]:
        return {"looks": self.looks, "looks_with_a_holder": self.held, "looks_with_two_on_one_gpu": len(self.together)}

    async def run(self) -> None:
        while not self.ended.is_set():
            with suppress(CudaError):
                async with cuda_helper() as helper:
                    while not self.ended.is_set():
                        self.look(await helper.info())
                        await asyncio.sleep(LOOK_SECONDS)

    def look(self, info: Any) -> None:
        self.looks += 1
        holders = [{name for pid in gpu.holdings if (name := self._owner(pid))} for gpu in info.gpus]
        self.held += any(holders)
        self.together += [(time.time(), sorted(names)) for names in holders if len(names) > 1]

    def _owner(self, pid: int) -> str:
        with suppress(OSError):
            cgroup = Path(f"/proc/{pid}/cgroup").read_text()
            return next((name for name in self.names if f"/{name}\n" in cgroup), "")
        return ""


@contextmanager
def watching(names: Sequence[str]) -> Iterator[Watch]:
    watch = Watch(names)
    thread = threading.Thread(target=lambda: asyncio.run(watch.run()), daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.ended.set()
        thread.join(10)


def _held(bench: Bench, agent: AgentOfSeats, name: str) -> dict[str, Any]:
    """Return what is held now: bytes of the GPU, of the arena, and KiB of host memory by whose processes they are."""
    arena = Memory(0, FOLDER)
    figures = least(
        lambda: {
            "vram bytes": sum(bench.in_use().values()),
            "arena bytes": (arena.size - arena.free()) if arena.size else 0,
            **{f"{owner} KiB": size for owner, size in resident_kib([name], agent=agent.pid).items()},
        }
    )
    counts = {key: value for key, value in by_processes([name]).items() if not key.endswith("MiB")}
    return {**figures, **counts}


def _more(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {key: after[key] - before[key] for key in before if key in after}


# -- the node


class AgentOfSeats(Agent):
    """A client of the agent that a scenario has started; `pid` is that one's."""

    def __init__(self, address: str, pid: int) -> None:
        super().__init__(address)
        self.pid = pid

    def __enter__(self) -> AgentOfSeats:
        return self


@contextmanager
def agent_with_seats(bench: Bench, groups: str) -> Iterator[AgentOfSeats]:
    """Run the node's agent, where shims look for it, with seats."""
    place = Path("/run/kybernate-agent")
    place.mkdir(exist_ok=True)
    socket = Path("/run/kybernate/agent.sock")
    (place / "agent.toml").write_text(
        SETTINGS.format(place=place, socket=socket)
        + groups
        + RULES.format(reserve="512Mi" if bench.pretended is None else "8Mi")
    )
    log = bench.out / "agent.log"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            ["kybernate", "agent", "--config", place / "agent.toml"],
            env=bench.machine.environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    try:
        with AgentOfSeats(f"unix:{socket}", process.pid) as agent:
            await_true(lambda: _serves(agent), "the agent has seats", seconds=90, shown=lambda: _end_of(log))
            yield agent
    finally:
        process.terminate()
        process.wait(60)
        Path("/run/kybernate/seats-wait").unlink(missing_ok=True)


def _serves(agent: Agent) -> bool:
    try:
        return bool(agent.seats(all=True))
    except Exception:  # noqa: BLE001  # not yet, whatever it is
        return False


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def status(agent: Agent, name: str) -> str:
    """Return the status of a container's seat, "" where it has none."""
    return next((_word(one) for one in agent.seats() if one.container == name), "")


def _word(seat: wire.Seat) -> str:
    return word(wire.Seat.Status, seat.status)


def become(agent: Agent, wanted: Mapping[str, str]) -> None:
    """Wait until the seats of these containers have these statuses, as the arbiter sees them at its next look."""

    def now() -> dict[str, str]:
        return {one.container: _word(one) for one in agent.seats() if one.container in wanted}

    await_true(lambda: now() == wanted, f"seats are {dict(wanted)}", shown=lambda: str(now()))


@contextmanager
def _seated(bench: Bench, name: str, profile: str, *, gpus: Sequence[int] = (0,), mib: int = 0) -> Iterator[Asked]:
    mib = min(mib or bench.mib, bench.mib)
    what = "several" if len(gpus) > 1 else "one"
    flags = [*_seat(bench, profile, mib), "--env", f"NVIDIA_VISIBLE_DEVICES={','.join(map(str, gpus))}"]
    with asked(_only(bench, gpus), name, flags, argv=bench.payload(what, mib, len(gpus))) as (one, ask):
        yield Asked(one, ask)


def _seat(bench: Bench, profile: str, mib: int) -> list[str]:
    vram = mib + MORE_MIB if bench.pretended is None else 2 * mib
    return ["--annotation", f"kybernate.io/seat={profile}", "--annotation", f"kybernate.io/vram={vram}Mi"]


def _only(bench: Bench, gpus: Sequence[int]) -> Bench:
    """Return the bench of containers that have these GPUs of the node, by their indices."""
    nodes = gpu_nodes()
    wanted = [word for number in gpus for word in ("--device", nodes[number])]
    first = bench.flags.index(nodes[0])  # after its --device
    return replace(bench, flags=[*bench.flags[: first - 1], *wanted, *bench.flags[first + 1 :]])


def _steps(operation: Operation) -> list[tuple[float, str]]:
    return [(step.seconds, step.name) for step in operation.state.steps]


def _seconds(at: Timestamp) -> float:
    return at.ToNanoseconds() / 1e9


def _runs(operation: wire.Operation, at: float) -> bool:
    """Return whether an operation ran at a time."""
    begin, end = _seconds(operation.started), _seconds(operation.ended)
    return bool(begin) and begin <= at <= (end or at) + LOOK_SECONDS
