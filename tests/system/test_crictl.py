"""`crictl` as users type it: what it does and prints with our runtime is what it does and prints with the stock one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.documented import CRICTL
from tests.system import identity
from tests.system.ctr import BUSYBOX, eventually, finished, run

SETTINGS = Path("/etc/crictl.yaml")
COUNT = 'trap "echo bye; exit 3" TERM; i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done'
NUMBER = re.compile(r"[\d.]+([kMG]?B)?")


@pytest.fixture(scope="module", autouse=True)
def _settings() -> Iterator[None]:
    """crictl with the configuration file that its manual shows."""
    if shutil.which("crictl") is None:
        pytest.skip("the lane has no crictl; `next` has")
    SETTINGS.write_text("runtime-endpoint: unix:///run/containerd/containerd.sock\ntimeout: 60\n")
    yield
    SETTINGS.unlink()


def crictl(*words: str, **options: Any) -> str:
    return run(["crictl", *words], **options)


def refused(*words: str) -> tuple[int, str]:
    """Run what must fail; return its status and its last line."""
    done = finished(["crictl", *words])
    assert done.returncode, f"crictl {' '.join(words)}: {done.stdout.decode()}"
    return done.returncode, timeless(done.stderr.decode().strip().splitlines()[-1])


def timeless(line: str) -> str:
    """Return a message without ids, times and gRPC's code: a runtime's failure is INTERNAL, and UNKNOWN of stock."""
    return re.sub(r'[0-9a-f]{12,64}|time="[^"]*"|code = \w+|\d+(\.\d+)?m?s', "*", line)


@dataclass
class Pod:
    """A pod, and the file that it was made from."""

    id: str
    file: Path
    logs: Path

    def create(self, name: str, script: str) -> str:
        """Create a container that runs a shell script, from a file."""
        metadata, image = {"name": name}, {"image": BUSYBOX}
        config = {"metadata": metadata, "image": image, "command": ["sh", "-c", script], "log_path": f"{name}.log"}
        file = self.file.with_name(f"{name}.json")
        uid = {"value": identity.user() or 0}
        security = {"run_as_user": uid, "run_as_group": uid, "capabilities": {"drop_capabilities": ["ALL"]}}
        linux = {"resources": {"memory_limit_in_bytes": 64 << 20}, "security_context": security}
        file.write_text(json.dumps({**config, "linux": linux}))
        return crictl("create", self.id, str(file), str(self.file)).strip()


@contextmanager
def running_pod(handler: str, folder: Path) -> Iterator[Pod]:
    name = f"crictl-{handler}-{os.getpid()}"
    file, logs = folder / "pod.json", folder / "logs"
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "attempt": 1}
    file.write_text(
        json.dumps({"metadata": metadata, "log_directory": str(logs), "linux": {"cgroup_parent": f"/{name}"}})
    )
    id = crictl("runp", "--runtime", handler, str(file)).strip()
    try:
        yield Pod(id, file, logs)
    finally:
        crictl("rmp", "--force", id)
        for cgroup in Path("/sys/fs/cgroup").glob(f"*/{name}"):  # of the kubelet, which removes it after the pod
            cgroup.rmdir()


def state(id: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(crictl("inspect", id))["status"]
    return {key: status[key] for key in ("state", "exitCode", "reason", "message")}


def shape(value: Any) -> Any:
    """Return what is the same for two containers: the names in an object, and of what kind their values are."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def columns(text: str) -> list[str]:
    """Return a table's header and its first line, with figures and ids left out."""
    header, *lines = text.splitlines()
    return [header.split()[0], *(NUMBER.sub("*", word) for word in lines[0].split()[1:] if len(word) < 12)]


def of_a_life(pod: Pod, folder: Path) -> dict[str, Any]:
    """Have a container live through all that crictl has for it, and return what a user has seen."""
    seen: dict[str, Any] = {}
    id = pod.create("counter", COUNT)
    seen["created"] = state(id)
    assert crictl("start", id).strip() == id
    eventually(lambda: crictl("logs", id).splitlines()[:5] == ["1", "2", "3", "4", "5"])
    seen["running"], seen["started twice"] = state(id), refused("start", id)
    seen["tail"] = len(crictl("logs", "--tail", "2", id).splitlines())
    listed = json.loads(crictl("ps", "--pod", pod.id, "-o", "json"))["containers"]
    seen["ps"] = [(one["metadata"], one["state"]) for one in listed]
    seen["inspect"] = shape(json.loads(crictl("inspect", id))["status"])
    seen["inspectp"] = shape(json.loads(crictl("inspectp", pod.id))["status"])
    seen |= {"exec": of_exec(id), "stats": of_stats(pod, id), "checkpoint": of_checkpoint(id, folder)}
    crictl("update", "--memory", str(96 << 20), id)
    seen["updated"] = crictl("exec", id, "sh", "-c", "cat /sys/fs/cgroup/memory/memory.limit_in_bytes").strip()
    crictl("stop", "--timeout", "20", id)
    seen["stopped"], seen["last"] = state(id), crictl("logs", "--tail", "1", id)
    seen["exec in stopped"] = refused("exec", "--sync", id, "true")
    seen["ps -a"] = json.loads(crictl("ps", "-a", "--pod", pod.id, "-o", "json"))["containers"][0]["state"]
    assert crictl("rm", id).strip() == id
    seen["gone"] = refused("inspect", id)
    crictl("stopp", pod.id)
    seen["pod"] = json.loads(crictl("inspectp", pod.id))["status"]["state"]
    return seen


def of_exec(id: str) -> list[Any]:
    """Run commands in the container, by the call that collects output and by the one that streams it."""
    seen: list[Any] = []
    for flags in ([], ["--sync"]):
        done = finished(["crictl", "exec", *flags, id, "sh", "-c", "echo out; echo err >&2; exit 7"])
        seen.append((done.returncode, done.stdout.decode(), timeless(done.stderr.decode().splitlines()[0])))
        seen.append(refused("exec", *flags, id, "/no/such/program"))
    seen.append(refused("exec", "--sync", "--timeout", "1", id, "sleep", "1000"))
    seen.append(crictl("exec", "-i", id, "cat", stdin=b"through it\n"))
    return seen


def of_stats(pod: Pod, id: str) -> list[Any]:
    """Read the figures of container and pod; they must be some. A rate is there once containerd has looked twice."""
    eventually(lambda: _stats(id)["cpu"].get("usageNanoCores"))
    eventually(lambda: _pod_stats(pod)[0]["linux"]["cpu"].get("usageNanoCores"))
    stats, pods = _stats(id), _pod_stats(pod)
    assert int(stats["cpu"]["usageCoreNanoSeconds"]["value"]) > 0
    assert int(stats["memory"]["workingSetBytes"]["value"]) > 0
    return [shape(stats), shape(pods), columns(crictl("stats", "--id", id))]


def _pod_stats(pod: Pod) -> list[dict[str, Any]]:
    return list(json.loads(crictl("statsp", "--id", pod.id, "-o", "json"))["stats"])


def _stats(id: str) -> dict[str, Any]:
    (stats,) = json.loads(crictl("stats", "--id", id, "-o", "json"))["stats"]
    return dict(stats)


def of_checkpoint(id: str, folder: Path) -> list[str]:
    """Write a checkpoint's archive of the running container, and return the names in it without those of images."""
    before = int(crictl("logs", "--tail", "1", id))
    archive = folder / "checkpoint.tar"
    assert crictl("checkpoint", f"--export={archive}", id).strip() == id
    eventually(lambda: int(crictl("logs", "--tail", "1", id)) > before + 3)
    with tarfile.open(archive) as tar:
        names = {name.removeprefix("./") for name in tar.getnames()}
    assert "checkpoint/inventory.img" in names
    archive.unlink()
    return sorted(name for name in names if not name.startswith("checkpoint/"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a user sees with containerd's own shim."""
    folder = tmp_path_factory.mktemp("stock")
    with running_pod("runc", folder) as pod:
        return of_a_life(pod, folder)


@pytest.mark.parametrize("handler", ["kybernate", "kybernate-path"])
def test_user_sees_what_the_stock_runtime_shows(handler: str, stock: dict[str, Any], tmp_path: Path) -> None:
    with running_pod(handler, tmp_path) as pod:
        seen = of_a_life(pod, tmp_path)
    if handler == "kybernate":  # containerd names CRIU's work directory only to a runtime of the stock type
        seen["checkpoint"] = sorted({*seen["checkpoint"], "dump.log", "stats-dump"})
    assert seen == stock
    assert seen["stopped"] == {"state": "CONTAINER_EXITED", "exitCode": 3, "reason": "Error", "message": ""}
    assert (seen["last"], seen["exec"][-1]) == ("bye\n", "through it\n")


def test_attach_and_port_forward_reach_the_pod(tmp_path: Path) -> None:
    with running_pod("kybernate", tmp_path) as pod:
        id = pod.create("echo", "while :; do echo hello | nc -l -p 7000; done")
        crictl("start", id)
        forward = subprocess.Popen(["crictl", "port-forward", pod.id, "17000:7000"], stdin=subprocess.DEVNULL)
        try:
            eventually(lambda: run(["busybox", "nc", "127.0.0.1", "17000"], status=None) == "hello\n")
        finally:
            forward.terminate()
            forward.wait(20)


def test_crictl_has_what_the_documentation_uses() -> None:
    for command, flags in CRICTL.items():
        text = crictl(*command, "--help")
        for flag in flags:
            assert re.search(rf"(^|[\s,]){re.escape(flag)}\b", text, re.MULTILINE), f"crictl {command}: {flag}"
