"""`kybernate up` against the work that it cannot avoid.

    python -m tests.bench.up [LANE]

`up.after_reboot`: five models whose templates exist, none of which runs, until all of them answer; against restores of
the same templates by the CRI, two at a time, until each answers. `up.first_request`: of a model that sleeps, against a
model that is started. `up.memory`: of the process with twenty models, against the bar. A line of JSON per figure is
appended to build/bench.jsonl. Exit status 1 where one misses its bar.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil

from kybernate.up import control
from kybernate.up.models_file import Entry, load
from kybernate.up.pods import Pods
from tests.bench.figures import HEADING, Figure, Pair, compare, record, row
from tests.system import gpu
from tests.system.ctr import eventually
from tests.system.demo import MIB, MODEL_BYTES, PYTHON, URL, Machine, machine

FIVE = [f"m{number}" for number in range(5)]
ROUNDS, AT_ONE_TIME = 6, 2
MEMORY_BAR = 150  # MiB
HEAD = f"""\
project: demo
listen: 127.0.0.1:8080
defaults:
  image: {PYTHON}
  command: [python3, /demo/server.py, "${{PORT}}", "${{MODEL}}", "{MODEL_BYTES}"]
  gpus: [0]
  mounts: ["PLACE:/demo", "{gpu.GPUS}:{gpu.GPUS}:rw"]
models:
"""
TWENTY = (
    "project: demo\nlisten: 127.0.0.1:8080\ndefaults:\n  template: false\n  health: /\n"
    "  command: /usr/bin/python3 -m http.server ${PORT} --bind 127.0.0.1 --directory /usr/share\nmodels:\n"
)


def ask(url: str, model: str) -> None:
    """Ask until there is an answer."""
    body = {"model": model, "messages": []}
    while True:
        try:
            if httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.01)


def timed(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def end(one: Machine) -> None:
    """End `up` and all pods, as a reboot does, with nothing that remembers them but their templates."""
    if process := control.running_process("demo"):
        os.kill(process, signal.SIGKILL)
        eventually(lambda: not control.running_process("demo"))
    with Pods("demo") as pods:
        for running in pods.list().values():
            pods.remove(running)


def after_reboot(one: Machine) -> Pair:
    entries = load(one.file, os.environ).models

    def ours() -> float:
        end(one)

        def work() -> None:
            one.kybernate("up", "-d", "--agent", one.agent.address)
            with ThreadPoolExecutor(len(FIVE)) as clients:
                list(clients.map(lambda name: ask(URL, name), FIVE))

        return timed(work)

    def restored(entry: Entry) -> None:
        with Pods("demo") as pods:
            pods.start(entry, f"{entry.name}-{entry.digest}")
        ask(f"http://127.0.0.1:{entry.port}", entry.name)

    def stock() -> float:
        end(one)

        def work() -> None:
            with ThreadPoolExecutor(AT_ONE_TIME) as restores:
                list(restores.map(restored, entries))

        return timed(work)

    return Pair("up.after_reboot.5", ours, stock, 1.15)


def first_request(one: Machine) -> Pair:
    def ours() -> float:
        one.kybernate("sleep", FIVE[0])
        return timed(lambda: ask(URL, FIVE[0]))

    def stock() -> float:
        def work() -> None:
            one.kybernate("restart", "cold", "--file", str(one.file))
            ask(URL, "cold")

        return timed(work)

    return Pair("up.first_request", ours, stock, None)


def main() -> int:
    """Return 1 when a figure misses its bar."""
    lane = (sys.argv[1:] or ["sid"])[0]
    print(HEADING, flush=True)
    figures: list[Figure] = []

    def measured(figure: Figure) -> None:
        figures.append(figure)
        record([figure])
        print(row(figure), flush=True)

    five = "".join(f"  {name}: {{}}\n" for name in FIVE) + "  cold: {template: false, gpus: [1]}\n"
    with machine(HEAD + five, 512 * MIB) as one:
        one.up()
        one.wait_ready(1, [*FIVE, "cold"])
        measured(compare(first_request(one), lane=lane, rounds=ROUNDS))
        one.file.write_text(one.file.read_text().replace("  cold: {template: false, gpus: [1]}\n", ""))
        measured(compare(after_reboot(one), lane=lane, rounds=ROUNDS))
    names = [f"n{number}" for number in range(20)]
    with machine(TWENTY + "".join(f"  {name}: {{}}\n" for name in names)) as one:
        one.up()
        one.wait_ready(1, names)
        used = psutil.Process(control.running_process("demo")).memory_full_info().pss / MIB
        measured(Figure("up.memory.20", lane, used, MEMORY_BAR, "MiB", 1.0, 1))
    return 0 if all(figure.good for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
