"""The packaged units under a real systemd: activation, readiness, watchdog, restarts, and what the hardening leaves."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.documentation import block
from tests.system import identity
from tests.system.ctr import BUSYBOX, eventually
from tests.system.leftovers import Snapshot, assert_nothing_left
from tests.system.systemd import AGENT, SOCKET, Systemd, systemd

UNITS = Path(__file__).parents[2] / "packaging" / "systemd"
LOOP = "while :; do sleep 1; done"


@pytest.fixture(scope="module")
def node() -> Iterator[Systemd]:
    before = Snapshot.take()
    with systemd(block("docs/agent.md", "units")) as manager:
        yield manager
    assert_nothing_left(before)


@pytest.fixture(autouse=True)
def _nothing_left_over() -> None:
    """One manager serves all these tests; what they have left is looked at when it has ended."""


@pytest.fixture
def container(node: Systemd) -> Iterator[str]:
    flags = ("--detach", "--cpu-shares", "0", "--runtime", "io.containerd.kybernate.v1")
    node.run("ctr", "run", *flags, *identity.flags(), BUSYBOX, "loop", "sh", "-c", LOOP)
    yield "loop"
    node.sh("for id in $(ctr task ls -q); do ctr task rm --force $id; ctr container rm $id; done")


def restarted(node: Systemd, act: Callable[[], object], *, seconds: float = 60) -> dict[str, str]:
    """Return the properties of the agent once it was started again by the manager, and answers."""
    before = node.show()
    act()
    eventually(
        lambda: node.show()["NRestarts"] > before["NRestarts"] and node.show()["ActiveState"] == "active",
        seconds=seconds,
    )
    node.containers()
    return node.show()


def test_units_have_no_fault(node: Systemd) -> None:
    files = [f"/etc/systemd/system/{name}" for name in (AGENT, SOCKET)]
    assert node.run("systemd-analyze", "verify", *files) == ""


def test_what_the_hardening_leaves_open_has_its_reason_in_the_unit(node: Systemd) -> None:
    argv = ("systemd-analyze", "security", "--offline=true", "--json=short", AGENT)
    found = json.loads(node.run(*argv))
    reasons = " ".join(line for line in (UNITS / AGENT).read_text().splitlines() if line.startswith("#"))
    opened = {f"{name.strip()}=" for one in found if one["set"] is False for name in re.findall(r"(\w+)=", one["name"])}
    assert opened
    assert sorted(option for option in opened if option not in reasons) == []


def test_service_has_started_when_the_agent_serves(node: Systemd) -> None:
    shown = node.show()
    assert (shown["Type"], shown["StatusText"]) == ("notify", "serving on /run/kybernate/agent.sock")
    assert "agent.started" in node.journal()
    assert node.run("stat", "-c", "%a %U %G", "/run/kybernate", "/run/kybernate/agent.sock").splitlines() == [
        "710 root kybernate",
        "660 root kybernate",
    ]


def test_members_of_the_group_may_look_and_nothing_else(node: Systemd) -> None:
    group = node.run("getent", "group", "kybernate").split(":")[2]
    reader = ("setpriv", "--reuid=65534", "--regid=65534", f"--groups={group}", "--")
    assert json.loads(node.run(*reader, "kybernate", "ps", "-o", "json")) == []
    node.run(*reader, "kybernate", "images", "-o", "json")
    stranger = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
    node.run(*stranger, "kybernate", "images", "-o", "json", status=4)


def test_first_client_starts_the_agent(node: Systemd) -> None:
    node.run("systemctl", "stop", AGENT)
    assert node.show()["ActiveState"] == "inactive"
    socket = node.run("stat", "-c", "%i", "/run/kybernate/agent.sock")
    node.containers()
    assert node.show()["ActiveState"] == "active"
    assert node.run("stat", "-c", "%i", "/run/kybernate/agent.sock") == socket


def test_settings_are_read_again_on_reload(node: Systemd) -> None:
    pid = node.main_pid()
    node.sh("mkdir -p /etc/kybernate; echo 'connections = 32' >/etc/kybernate/agent.toml; systemctl reload " + AGENT)
    eventually(lambda: "settings.reloaded" in node.journal())
    assert node.main_pid() == pid


def test_shims_see_what_the_hardened_agent_brings_from_the_store(node: Systemd, container: str) -> None:
    """The unit has a mount namespace of its own; the memory that the image arrives in is mounted on the host."""
    settings, place = "/etc/kybernate/agent.toml", "/var/lib/kybernate/checkpoints/stored"
    own, host = (node.run("readlink", f"/proc/{pid}/ns/mnt") for pid in (node.main_pid(), 1))
    assert own != host
    store = """[store]\nurl = "file:///var/lib/kybernate/test-store"\nkey = "/var/lib/kybernate/test.key"\n"""
    node.sh(f"printf '{store}' >{settings}; systemctl reload {AGENT}")
    try:
        node.sh(f"kybernate store init; kybernate checkpoint {container} stored --exit; kybernate store put stored")
        node.sh(f"rm -r {place}; ctr container rm {container}")
        back = ("kybernate", "restore", "--from", "store", "stored", "--detach", "--json")
        answer = json.loads(node.run(*back, "--name", container))
        assert answer["source"] == "disk file:///var/lib/kybernate/test-store"
        assert [one["state"] for one in node.containers()] == ["running"]
        node.run("test", "!", "-e", "/run/kybernate/arriving")
    finally:
        node.sh(f"rm -rf {settings} {place} /var/lib/kybernate/test-store; systemctl reload {AGENT}")


def test_agent_that_is_killed_is_started_again_and_containers_run_on(node: Systemd, container: str) -> None:
    eventually(lambda: [one["state"] for one in node.containers()] == ["running"])
    task, socket = node.run("ctr", "task", "ls"), node.run("stat", "-c", "%i", "/run/kybernate/agent.sock")
    assert restarted(node, lambda: node.kill(signal.SIGKILL))["Result"] == "success"
    assert node.run("ctr", "task", "ls") == task
    assert node.run("stat", "-c", "%i", "/run/kybernate/agent.sock") == socket
    assert [one["state"] for one in node.containers()] == ["running"]


def test_agent_that_hangs_is_ended_by_the_watchdog_and_started_again(node: Systemd) -> None:
    assert node.show()["WatchdogUSec"] == "30s"
    node.drop_in("patience", "[Service]\\nWatchdogSec=6\\n")
    node.run("systemctl", "restart", AGENT)
    restarted(node, lambda: node.kill(signal.SIGSTOP))
    assert "Watchdog timeout" in node.journal()


def test_hardened_agent_checkpoints_and_restores(node: Systemd, container: str) -> None:
    node.sh(
        "kybernate checkpoint loop whole --exit && ctr task rm loop && kybernate inspect whole --verify"
        " && kybernate restore whole --name again --detach"
    )
    assert [one["state"] for one in node.containers() if one["container"] == "again"] == ["running"]
    verbs = {one["verb"]: one["state"] for one in json.loads(node.run("kybernate", "ops", "-o", "json"))}
    assert verbs == {"checkpoint": "succeeded", "restore": "succeeded"}
