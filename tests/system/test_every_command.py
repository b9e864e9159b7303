"""Every command as a user meets it in the first hour: without rights, agent or containerd, or with garbage.

Each ends in time with a sentence, and never with a traceback.

Every option and argument of every command gets one kind of garbage, and every command one odd address. All kinds with
all commands take twenty minutes; KYBERNATE_EVERY=1 asks for them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import typer

from kybernate.cli.application import application
from tests.lab.node import Containerd
from tests.system import warm
from tests.system.gpu.node import forget_helper
from tests.system.node_agent import running, short_place

NOBODY = 65534
AT_A_TIME = 8
SECONDS = 100  # for any command: none of its own deadlines is longer where nothing answers
SERVES = {("page", "serve"), ("proxy",)}  # until they are ended
GARBAGE = (
    "", "-", "../../etc/passwd", "\x1b[31m\n", "9" * 20, "-1", "nan", "\udcff", "ü☃" * 700, "a=b,c", "[::1", "http://[",
)  # fmt: skip
ADDRESSES = (
    "127.0.0.1:1", "localhost:7443", "http://x", "dns:///x", "unix:relative", "/nonexistent", ":::", "x" * 300,
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command with words that it accepts. `options` are those that take a value."""

    words: tuple[str, ...]
    arguments: tuple[str, ...]
    required: tuple[str, ...]
    options: tuple[str, ...]

    def argv(self, arguments: Sequence[str] | None = None, *more: str) -> list[str]:
        """Return the command line with these arguments in place of its own, and more words before them."""
        given = self.arguments if arguments is None else arguments
        return ["kybernate", *self.words, *self.required, *more, "--", *given]

    def spoilt(self, garbage: str) -> Iterator[list[str]]:
        """Yield the command line with each argument and each option replaced in turn."""
        for place in range(len(self.arguments)):
            yield self.argv([*self.arguments[:place], garbage, *self.arguments[place + 1 :]])
        yield from (self.argv(None, f"{option}={garbage}") for option in self.options)


def commands() -> list[Command]:
    found = (one for one in _leaves((), typer.main.get_command(application())) if one.words not in SERVES)
    return sorted(found, key=lambda one: one.words)


def _leaves(words: tuple[str, ...], at: Any) -> Iterator[Command]:
    if inner := getattr(at, "commands", None):
        for name, one in inner.items():
            yield from _leaves((*words, name), one)
        return
    arguments, required, options = [], [], []
    for one in at.params:
        if one.param_type_name == "argument":
            if one.required:
                arguments.append(f"no-{one.name.replace('_', '-')}")
        elif not (one.is_flag or one.count):
            options.append(one.opts[0])
            if one.required:
                required += [one.opts[0], "x"]
    if words == ("agent",):
        required.append("--check")  # without it, the command serves until it is ended
    yield Command(words, tuple(arguments), tuple(required), tuple(options))


ALL = commands()


def report(argv: Sequence[str], **options: Any) -> str:
    """Run a command, and return what is wrong with how it ended, "" where nothing is."""
    try:
        done = warm.run(argv, timeout=SECONDS, **options)
    except subprocess.TimeoutExpired:
        return f"{argv}: it has not ended after {SECONDS} s"
    text = (done.stdout + done.stderr).decode(errors="replace")
    if "Traceback" in text or "unexpected error" in text or not 0 <= done.returncode <= 130:
        return f"{argv} ended with {done.returncode}: {text[-900:]}"
    if done.returncode and not text.strip():
        return f"{argv} ended with {done.returncode} without a word"
    return ""


def wrong(lines: Sequence[Sequence[str]], **options: Any) -> list[str]:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return [found for found in pool.map(lambda argv: report(argv, **options), lines) if found]


@pytest.fixture
def clean() -> Iterator[Mapping[str, str]]:
    """The environment of a user who has logged in. The program that serves commands has started before they do."""
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
    warm.run(["kybernate", "--version"])
    yield environment
    forget_helper()


def test_as_nobody(clean: Mapping[str, str]) -> None:
    found = wrong([one.argv() for one in ALL], user=NOBODY, environment=clean)
    assert not found, "\n\n".join(found)


def test_agent_as_nobody(clean: Mapping[str, str]) -> None:
    done = warm.run(["kybernate", "agent"], user=NOBODY, environment=clean)
    assert done.returncode
    assert done.stderr.startswith(b"kybernate: ")


def test_without_an_agent(clean: Mapping[str, str]) -> None:
    found = wrong([one.argv() for one in ALL], environment=clean)
    assert not found, "\n\n".join(found)


def test_as_nobody_with_an_agent(clean: Mapping[str, str]) -> None:
    with short_place() as place, running(place) as agent:
        environment = {**clean, "KYBERNATE_AGENT": agent.address}
        found = wrong([one.argv() for one in ALL], user=NOBODY, environment=environment)
    assert not found, "\n\n".join(found)


def test_with_an_agent_that_hangs(clean: Mapping[str, str]) -> None:
    with short_place() as place, running(place) as agent:
        assert agent.process is not None
        agent.process.send_signal(signal.SIGSTOP)
        try:
            found = wrong([one.argv() for one in ALL], environment={**clean, "KYBERNATE_AGENT": agent.address})
        finally:
            agent.process.send_signal(signal.SIGCONT)
    assert not found, "\n\n".join(found)


@contextmanager
def dead_containerd(number: int) -> Iterator[None]:
    daemon = Containerd()
    try:
        if number == signal.SIGKILL:
            daemon.kill()
        else:
            os.kill(daemon.pid, number)
        yield
    finally:
        if number != signal.SIGKILL:
            os.kill(daemon.pid, signal.SIGCONT)
        daemon.restart()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_with_a_dead_containerd(number: int, clean: Mapping[str, str]) -> None:
    with dead_containerd(number):
        found = wrong([one.argv() for one in ALL], environment=clean)
    assert not found, "\n\n".join(found)


def part(lines: Sequence[list[str]], number: int, parts: int) -> Sequence[list[str]]:
    """Return every line of `lines`, or of so many parts the one with this number."""
    return lines if os.environ.get("KYBERNATE_EVERY") else lines[number::parts]


@pytest.mark.parametrize("number", range(len(GARBAGE)), ids=lambda number: ascii(GARBAGE[number][:20]))
def test_with_garbage(number: int, clean: Mapping[str, str]) -> None:
    spoilt = [line for one in ALL for line in one.spoilt(GARBAGE[number])]
    found = wrong(part(spoilt, number, len(GARBAGE)), environment=clean)
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("number", range(len(ADDRESSES)), ids=lambda number: ADDRESSES[number][:20])
def test_with_an_address_of_no_agent(number: int, clean: Mapping[str, str]) -> None:
    lines = part([one.argv() for one in ALL], number, len(ADDRESSES))
    found = wrong(lines, environment={**clean, "KYBERNATE_AGENT": ADDRESSES[number]})
    assert not found, "\n\n".join(found)
