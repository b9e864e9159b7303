"""What people ask of a running `kybernate up` is answered by its socket, and refused with the words of what failed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kybernate.node.failure import Failure, Invalid, Missing, Refused, Unavailable
from kybernate.up import control


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control, "LOCKS", tmp_path)
    return tmp_path


async def models(asked: Mapping[str, Any]) -> Any:
    return [{"model": "one", "aliases": ["eins"]}]


async def wake(asked: Mapping[str, Any]) -> Any:
    if asked.get("model") != "one":
        raise Missing("no model is called so", state="nothing was done", advice="look at the list")
    return asked["model"]


def asked(do: str, **words: Any) -> Any:
    async def ask() -> Any:
        async with control.serving("home", {"models": models, "wake": wake}):
            assert stat.S_IMODE(control.place("home").stat().st_mode) == 0o600
            return await asyncio.to_thread(control.call, "home", do, **words)

    return asyncio.run(ask())


def test_answer_is_the_verbs() -> None:
    assert asked("wake", model="one") == "one"


@pytest.mark.parametrize(
    ("do", "model", "kind", "said"),
    [
        ("wake", "two", Missing, "no model is called so"),
        ("wake", [1], Missing, "no model is called so"),
        ("explode", "one", Invalid, "is not understood"),
    ],
)
def test_failure_comes_with_its_kind(do: str, model: Any, kind: type[Failure], said: str) -> None:
    with pytest.raises(kind, match=said):
        asked(do, model=model)


@pytest.mark.parametrize("line", [b"\n", b"[1]\n", b"{\n", b"x" * 5000 + b"\n"])
def test_what_is_no_request_changes_nothing(line: bytes) -> None:
    async def send() -> bytes:
        async with control.serving("home", {"models": models}):
            reader, writer = await asyncio.open_unix_connection(str(control.place("home")))
            writer.write(line)
            answer = await reader.readline()
            writer.close()
            return answer

    answer = asyncio.run(send())
    assert answer == b"" or b'"error"' in answer


def test_model_is_found_by_each_of_its_names() -> None:
    async def find() -> list[str]:
        async with control.serving("home", {"models": models}):
            return [await asyncio.to_thread(control.project_of, name) for name in ("one", "eins", "two")]

    assert asyncio.run(find()) == ["home", "home", ""]


def test_without_a_process_it_is_unavailable(place: Path) -> None:
    with pytest.raises(Unavailable, match="no process keeps the models"):
        control.call("home", "models")
    control.place("home").touch()  # left by a process that was killed
    with pytest.raises(Unavailable):
        control.call("home", "models")
    assert control.project_of("one") == ""


def test_one_process_keeps_a_project(place: Path) -> None:
    with control.only_one("home"):
        assert control.running_process("home") > 0
        with pytest.raises(Refused, match="keeps the models of the project"), control.only_one("home"):
            pass
    assert control.running_process("home") == 0


def test_who_looks_is_not_taken_for_who_keeps(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up -d` looks for the process that it has started, while that one looks and then begins to keep the project."""
    path = place / "home.lock"
    path.write_text("1")  # of one that has ended
    with path.open("r+") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        assert control.running_process("home") == 0
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(look, fcntl.LOCK_UN))
        with control.only_one("home"):
            assert control.running_process("home") == os.getpid()
            with pytest.raises(Refused, match=f"process {os.getpid()} keeps"), control.only_one("home"):
                pass


def test_number_of_a_process_that_has_ended_is_none(place: Path) -> None:
    with control.only_one("home"):
        (place / "home.lock").write_text(str((1 << 22) + 1))  # more than there can be
        assert control.running_process("home") == 0
