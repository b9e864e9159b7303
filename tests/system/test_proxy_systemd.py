"""The proxy's packaged unit under a real systemd: what its hardening leaves, HAProxy as its child, kills, reloads."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation import block
from tests.system.ctr import BUSYBOX, eventually
from tests.system.leftovers import Snapshot, assert_nothing_left
from tests.system.proxy_process import free_port
from tests.system.systemd import Systemd, systemd

PROXY = "kybernate-proxy.service"
UNIT = Path(__file__).parents[2] / "packaging" / "systemd" / PROXY
LOG = "/var/log/kybernate/proxy.jsonl"


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Those of the proxy and of the model."""
    return free_port(), free_port()


@pytest.fixture(scope="module")
def node(ports: tuple[int, int]) -> Iterator[Systemd]:
    """A manager with agent and proxy, and a model: a container without CUDA, which sleeps frozen."""
    before, (own, port) = Snapshot.take(), ports
    with systemd(block("docs/agent.md", "units")) as manager:
        flags = ("--detach", "--cpu-shares", "0", "--net-host", "--runtime", "io.containerd.kybernate.v1")
        serve = f"echo awake | tee /tmp/work >/tmp/other; exec httpd -f -p 127.0.0.1:{port} -h /tmp"
        manager.run("ctr", "run", *flags, BUSYBOX, "model", "sh", "-c", serve)
        model = f"container: model, upstream: 'http://127.0.0.1:{port}', idle: 300ms"
        settings = f"listen: 127.0.0.1:{own}\\nplane: haproxy\\naccess_log: {LOG}\\nmodels:\\n  model: {{{model}}}\\n"
        manager.sh(f'mkdir -p /etc/kybernate; printf "{settings}routes: [{{to: model}}]\\n" >/etc/kybernate/proxy.yaml')
        manager.sh("cd /src; " + "\n".join(block("docs/proxy.md", "unit").commands))
        yield manager
        manager.run("systemctl", "stop", PROXY)
        manager.sh("ctr task rm --force model; ctr container rm model")
    assert_nothing_left(before)


@pytest.fixture(autouse=True)
def _nothing_left_over() -> None:
    """One manager serves all these tests; what they have left is looked at when it has ended."""


def ask(ports: tuple[int, int], path: str = "/work") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}{path}", timeout=60) as answer:
        assert answer.status == 200
        return str(answer.read().decode().strip())


def has_no_route(ports: tuple[int, int], path: str) -> bool:
    try:
        ask(ports, path)
    except urllib.error.HTTPError as error:
        return error.code == 404
    return False


def sleeps(node: Systemd) -> None:
    eventually(lambda: "PAUSED" in node.run("ctr", "task", "ls"), seconds=60)


def haproxy(node: Systemd) -> int:
    """Return the process id of HAProxy, as the manager counts."""
    return int(node.run("pgrep", "-n", "-f", "/run/kybernate/proxy/haproxy.cfg"))


def test_unit_has_no_fault_and_says_why_it_is_as_open_as_it_is(node: Systemd) -> None:
    assert node.run("systemd-analyze", "verify", f"/etc/systemd/system/{PROXY}") == ""
    found = json.loads(node.run("systemd-analyze", "security", "--offline=true", "--json=short", PROXY))
    reasons = " ".join(line for line in UNIT.read_text().splitlines() if line.startswith("#"))
    opened = {f"{name.strip()}=" for one in found if one["set"] is False for name in re.findall(r"(\w+)=", one["name"])}
    assert opened
    assert sorted(option for option in opened if option not in reasons) == []


def test_service_has_started_when_it_serves_and_wakes(node: Systemd, ports: tuple[int, int]) -> None:
    shown = node.show(PROXY)
    assert (shown["Type"], shown["StatusText"]) == ("notify", f"serving on port {ports[0]}")
    for _ in range(2):
        sleeps(node)
        assert ask(ports) == "awake"


def test_log_is_opened_again_on_reload(node: Systemd, ports: tuple[int, int]) -> None:
    pid = node.main_pid(PROXY)
    sleeps(node)
    node.sh(f"mv {LOG} {LOG}.1; systemctl reload {PROXY}")
    eventually(lambda: node.run("test", "-e", LOG) == "")
    assert ask(ports) == "awake"
    (line,) = node.run("cat", LOG).splitlines()
    assert (json.loads(line)["path"], json.loads(line)["cold"]) == ("/work", True)
    assert node.main_pid(PROXY) == pid


def test_routes_are_read_again_on_reload_and_other_settings_are_not(node: Systemd, ports: tuple[int, int]) -> None:
    settings = "/etc/kybernate/proxy.yaml"
    assert ask(ports, "/other") == "awake"
    node.sh(f"cp {settings} /run/before; sed -i 's,{{to: model}},{{path: /work\\, to: model}},' {settings}")
    node.sh(f"systemctl reload {PROXY}")
    eventually(lambda: has_no_route(ports, "/other"))
    assert ask(ports) == "awake"
    node.sh(f"sed -i 's,300ms,301ms,' {settings}; systemctl reload {PROXY}")
    eventually(lambda: "models cannot change while the proxy runs" in node.journal(PROXY))
    assert ask(ports) == "awake"
    node.sh(f"cp /run/before {settings}; systemctl reload {PROXY}")


def test_proxy_that_is_killed_is_started_again_and_takes_its_haproxy_over(
    node: Systemd, ports: tuple[int, int]
) -> None:
    before, child = node.show(PROXY), haproxy(node)
    node.kill(signal.SIGKILL, PROXY)
    eventually(
        lambda: node.show(PROXY)["NRestarts"] > before["NRestarts"] and node.show(PROXY)["ActiveState"] == "active",
        seconds=60,
    )
    assert haproxy(node) == child
    sleeps(node)
    assert ask(ports) == "awake"


def test_stopped_proxy_leaves_no_process(node: Systemd, ports: tuple[int, int]) -> None:
    node.run("systemctl", "stop", PROXY)
    eventually(lambda: node.run("pgrep", "-f", "/run/kybernate/proxy/haproxy.cfg", status=None) == "")
    node.run("systemctl", "start", PROXY)
    assert ask(ports) == "awake"
