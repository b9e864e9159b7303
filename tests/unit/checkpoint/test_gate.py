"""What the script of a restore is answered, and that every doubt ends the processes before CRIU releases them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate_shim.checkpoint import gate as gates
from kybernate_shim.checkpoint import script as scripts
from kybernate_shim.checkpoint.criu.config import Configuration
from kybernate_shim.checkpoint.gate import Gate, held_back
from kybernate_shim.checkpoint.privileges import PrivilegesExceeded
from kybernate_shim.checkpoint.script import ANSWER, ASK, SCRIPTS, arm
from kybernate_shim.errors import Refused
from kybernate_shim.native import HOLDER, build
from kybernate_shim.oci.runtime import RuntimeTimedOut
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.credentials import PrivilegeAllowance

EXCESS = "process 1 (sh): uid 0, the pod allows 1000 only"


class Killed:
    """Notes that the processes were killed."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def gate(
    look: Callable[[int], list[str]] = lambda init: [], take_out: Callable[[int], object] = lambda criu: None
) -> tuple[Gate, Killed]:
    killed = Killed()
    return Gate(lambda criu: take_out(criu) and None, look, killed), killed


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Init and CRIU of what was killed while CRIU held it."""
    pairs: list[tuple[int, int]] = []
    monkeypatch.setattr(gates, "end_held", lambda init, criu: pairs.append((init, criu)))
    return pairs


def last_answer(one: Gate, *questions: str) -> bytes:
    async def ask() -> bytes:
        return [await one.answer(question) for question in questions][-1]

    return asyncio.run(ask())


def test_processes_within_their_limits_pass() -> None:
    seen: list[int] = []
    one, killed = gate(lambda init: seen.append(init) or [])
    assert last_answer(one, "pre-restore 7 0", "pre-resume 7 42") == b"pass\n"
    one.require_passed()
    assert (seen, killed.times) == ([42], 0)


def test_excess_ends_what_is_held_and_is_the_reason(ended: list[tuple[int, int]]) -> None:
    one, killed = gate(lambda init: [EXCESS])
    assert last_answer(one, "pre-restore 7 0", "pre-resume 7 42") == b"no\n"
    assert (ended, killed.times) == ([(42, 7)], 0)
    with pytest.raises(PrivilegesExceeded, match=r"uid 0, the pod allows 1000 only.*killed before they ran"):
        one.require_passed()


def fails(init: int) -> list[str]:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("question", ["pre-resume 7 42", "pre-resume 7", "", "pre-resume x y"])
def test_look_that_fails_is_a_refusal(question: str) -> None:
    one, killed = gate(fails)
    assert last_answer(one, "pre-restore 7 0", question) == b"no\n"
    assert killed.times == 0
    with pytest.raises(PrivilegesExceeded, match="could not be examined"):
        one.require_passed()


def test_script_that_was_not_executed_is_a_refusal() -> None:
    with pytest.raises(PrivilegesExceeded, match="CRIU did not stop for their comparison"):
        gate()[0].require_passed()


def test_criu_is_out_of_the_cgroup_before_the_processes_get_their_privileges() -> None:
    moved: list[int] = []
    one, _ = gate(take_out=moved.append)
    assert last_answer(one, "pre-restore 7 0", "post-restore 7 42") == b"pass\n"
    assert (moved, one.passed) == ([7], False)


def test_criu_that_stays_in_the_cgroup_ends_the_restore() -> None:
    one, killed = gate(take_out=fails)
    assert last_answer(one, "pre-restore 7 0", "post-restore 7 42") == b"no\n"
    assert (killed.times, one.passed) == (0, False)


@pytest.mark.parametrize("action", ["post-restore", "pre-resume"])
def test_criu_that_was_not_taken_out_ends_the_restore(action: str) -> None:
    one, killed = gate()
    assert last_answer(one, f"{action} 7 42") == b"no\n"
    assert (killed.times, one.passed) == (0, False)


async def forever() -> None:
    await asyncio.Event().wait()


def test_deadline_kills_the_processes_before_criu() -> None:
    one, killed = gate()
    with pytest.raises(RuntimeTimedOut, match=r"did not end within 0\.01 s"):
        asyncio.run(one.guarded(forever(), 0.01))
    assert killed.times == 1


def test_cancelled_restore_kills_the_processes_before_criu() -> None:
    order: list[str] = []

    async def restore() -> None:
        try:
            await forever()
        finally:
            order.append("CRIU ended")

    async def cancel() -> None:
        one = Gate(lambda criu: None, lambda init: [], lambda: order.append("processes killed"))
        work = asyncio.ensure_future(one.guarded(restore(), 0))
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait({work})
        assert work.cancelled()

    asyncio.run(cancel())
    assert order == ["processes killed", "CRIU ended"]


@pytest.mark.parametrize("look", [fails, lambda init: [EXCESS]])
def test_whatever_the_doubt_what_is_held_ends(look: Callable[[int], list[str]], ended: list[tuple[int, int]]) -> None:
    last_answer(gate(look)[0], "pre-restore 7 0", "pre-resume 7 42")
    assert ended == [(42, 7)]


def test_held_processes_are_killed_before_criu(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    monkeypatch.undo()
    monkeypatch.setattr(gates, "process_tree", lambda init: [init, 43])
    monkeypatch.setattr(os, "kill", lambda pid, number: order.append(pid))
    gates.end_held(42, 7)
    assert order == [42, 43, 7]


def run_script(script: Path, action: str, environment: dict[str, str], init: int) -> subprocess.Popen[bytes]:
    variables = {**os.environ, **environment, "CRTOOLS_SCRIPT_ACTION": action, "CRTOOLS_INIT_PID": str(init)}
    return subprocess.Popen([script], env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(params=["compiled", "shell"])
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The program in both forms."""
    return build(HOLDER, tmp_path) if request.param == "compiled" else SCRIPTS[-1]


@pytest.fixture
def victim() -> Callable[[], subprocess.Popen[bytes]]:
    """Stands in for the restored init."""
    return lambda: subprocess.Popen(["sleep", "100"])


@pytest.mark.parametrize("action", ["setup-namespaces", "network-unlock", "post-resume"])
def test_script_asks_at_three_steps_only(script: Path, action: str) -> None:
    assert run_script(script, action, {}, 0).wait(10) == 0


@pytest.mark.parametrize("environment", [{}, {ASK: "/proc/self/fd/99", ANSWER: "/proc/self/fd/99"}])
def test_script_without_a_daemon_kills(
    script: Path, environment: dict[str, str], victim: Callable[[], subprocess.Popen[bytes]]
) -> None:
    init = victim()
    assert run_script(script, "pre-resume", environment, init.pid).wait(10) == 1
    assert init.wait(10) == -9


@pytest.mark.parametrize(("found", "status"), [([], 0), ([EXCESS], 1)])
def test_script_and_daemon_agree(
    found: list[str],
    status: int,
    script: Path,
    victim: Callable[[], subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(gates, "take_out", lambda criu, cgroups: None)
    monkeypatch.setattr(gates, "look", lambda init, spec, allowance, mounts: looked.append(init) or found)
    init = victim()

    async def ask() -> tuple[int, bool]:
        async with held_back(Spec({"linux": {"cgroupsPath": "/kybernate-test/none"}}), PrivilegeAllowance()) as held:
            assert held is not None
            assert await asyncio.to_thread(run_script(script, "pre-restore", held.environment, 0).wait, 10) == 0
            asking = run_script(script, "pre-resume", held.environment, init.pid)
            return await asyncio.to_thread(asking.wait, 10), held.passed

    assert asyncio.run(ask()) == (status, not found)
    assert looked == [init.pid]
    if status == 0:
        assert init.poll() is None
        init.kill()
    assert init.wait(10) == -9


def test_what_may_have_anything_is_not_held() -> None:
    async def hold() -> Gate | None:
        async with held_back(Spec({}), None) as held:
            return held

    assert asyncio.run(hold()) is None


def test_criu_is_given_the_script(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "SCRIPTS", (tmp_path / "absent", script))
    early = tmp_path / "early.conf"
    early.write_text("network-lock skip\n")
    arm(Configuration((), {"CRIU_CONFIG_FILE": str(early)}))
    assert early.read_text() == f"network-lock skip\naction-script {script}\n"


def test_script_that_cannot_be_executed_ends_the_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "SCRIPTS", (tmp_path / "none", tmp_path / "none.sh"))
    with pytest.raises(Refused, match=r"none\.sh cannot be executed.*Nothing was changed"):
        arm(Configuration((), {"CRIU_CONFIG_FILE": str(tmp_path / "early.conf")}))
    assert not (tmp_path / "early.conf").exists()


def test_what_criu_did_not_bring_back_is_put_right_before_the_look() -> None:
    order: list[str] = []
    one, _ = gate(lambda init: order.append(f"looked at {init}") or [])
    one.settle = lambda init: order.append(f"settled {init}")
    assert last_answer(one, "pre-restore 7 0", "pre-resume 7 42") == b"pass\n"
    assert order == ["settled 42", "looked at 42"]


def test_processes_that_cannot_be_put_right_do_not_run() -> None:
    one, _ = gate()
    one.settle = fails
    assert last_answer(one, "pre-restore 7 0", "pre-resume 7 42") == b"no\n"
    assert "Input/output error" in one.refusals[0]
