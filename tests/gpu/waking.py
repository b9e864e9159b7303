"""Wake on use and declared VRAM on a real GPU; the first needs the node's agent, and a kit with `--extras agent`."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.gpu.scenarios import Bench, Container, await_true, container

WAKES = ["--annotation", "kybernate.io/wake-on-use=true"]
USES = 5
IDLE_SECONDS = 2.0  # that a program waits on its own before a line: its threads are at rest then
INSIDE = "/asked"
ASKED = "STEPS_FROM"  # tests/gpu/payload.py and tests/fakes/cuda/computes.py do a step for each line of that FIFO
BEYOND = "BEYOND_MIB"  # that much is refused, in payload.py
MORE_MIB = 4096  # more than its payload, as PyTorch needs
SETTINGS = """
state_directory = "{place}/state"
socket = "{place}/agent.sock"
registry = "sqlite:///{place}/registry.db"
"""


def wakes_on_use(bench: Bench) -> None:
    """A suspended program that uses its GPU comes back by it: known by the library, and from outside without it."""
    with _agent(bench) as address:
        for way, flags in (("library", _limited(bench)), ("from-outside", [])):
            name = f"wakes-on-use-{way}"
            with asked(bench, name, [*WAKES, *flags]) as (one, ask):
                for _ in range(USES):
                    bench.kybernate("suspend", name, "--agent", address)
                    time.sleep(IDLE_SECONDS)
                    before, began = one.steps(), time.monotonic()
                    ask()
                    await_true(lambda: one.steps() > before, f"{name} computes", shown=one.log.read_text)  # noqa: B023
                    bench.rows.append((name, "use to computing", time.monotonic() - began, 0))


def vram_is_limited(bench: Bench) -> None:
    """What exceeds the declared VRAM fails as on a full GPU; the program continues to compute, also after a wake."""
    name = "vram-is-limited"
    with asked(bench, name, [*_limited(bench), "--env", f"{BEYOND}={MORE_MIB + 512}"]) as (one, ask):
        for verb in ("suspend", "resume"):
            bench.kybernate(verb, name)
        before = one.steps()
        ask()
        await_true(lambda: one.steps() > before, f"{name} computes", shown=one.log.read_text)


def _limited(bench: Bench) -> list[str]:
    return ["--annotation", f"kybernate.io/vram={bench.mib + MORE_MIB}Mi"]


@contextmanager
def asked(
    bench: Bench, name: str, flags: Sequence[str], *, argv: Sequence[str] = ()
) -> Iterator[tuple[Container, Callable[[], None]]]:
    """Run the payload, or `argv`, which then waits; `ask` has it do a step."""
    place = bench.images / f"{name}.asked"
    place.mkdir()
    fifo = place / "steps"
    os.mkfifo(fifo)
    shown = [
        "--mount",
        f"type=bind,src={place},dst={INSIDE},options=rbind:ro",
        "--env",
        f"{ASKED}={INSIDE}/{fifo.name}",
    ]

    def ask() -> None:
        with fifo.open("w") as lines:  # the program has opened it, or does so before this returns
            lines.write("\n")

    with container(bench, name, *(argv or bench.payload("one")), flags=[*shown, *flags]) as one:
        yield one, ask


@contextmanager
def _agent(bench: Bench) -> Iterator[str]:
    """Run the node's agent; yield its address."""
    place = bench.machine.root / "agent-of-uses"
    place.mkdir()
    settings, address = place / "agent.toml", f"unix:{place}/agent.sock"
    settings.write_text(SETTINGS.format(place=place))
    with (place / "agent.log").open("ab") as log:
        agent = subprocess.Popen(
            ["kybernate", "agent", "--config", settings],
            env=bench.machine.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        await_true(lambda: _answers(bench, address), "the agent answers", shown=(place / "agent.log").read_text)
        yield address
    except AssertionError as error:
        raise AssertionError(f"{error}\nthe agent: {_end_of(place / 'agent.log')}") from error
    finally:
        agent.terminate()
        agent.wait(60)


def _answers(bench: Bench, address: str) -> bool:
    ask = ["kybernate", "ps", "--agent", address]
    return not subprocess.run(ask, env=bench.machine.environment, capture_output=True, check=False).returncode


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
