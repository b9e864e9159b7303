"""Checkpoint and restore through every entry point: a counter continues where it was, in its old or a new place."""

from __future__ import annotations

import json
import shutil
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.lab.node import Containerd
from tests.system.cri import Cri, Pod
from tests.system.ctr import BUSYBOX, KYBERNATE, CommandFailed, Ctr, Events, eventually, run

COUNTER = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; echo $i > /tmp/count; sleep 0.05; done"]
COUNTED = 5  # how far a counter gets before anything happens to it


class Counter:
    """A counting container with its log in a file."""

    def __init__(self, ctr: Ctr, id: str, log: Path) -> None:
        self.ctr = ctr
        self.id = id
        self.log = log

    @property
    def lines(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []

    def goes_on(self, *, after: int = 0) -> int:
        """Wait until it counts beyond `after`, without a gap or a repetition, and return its first number."""
        eventually(lambda: len(self.lines) >= COUNTED and self.lines[-1] > after)
        lines = self.lines
        assert lines == list(range(lines[0], lines[0] + len(lines)))
        return lines[0]

    def stands_still(self) -> bool:
        before = self.lines
        time.sleep(0.3)
        return self.lines == before


@pytest.fixture
def ctr() -> Ctr:
    return Ctr()


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory for images; pytest keeps its own for a while, images are too big for that."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def counter(ctr: Ctr, scratch: Path) -> Iterator[Counter]:
    with counting(ctr, scratch / "log") as one:
        one.goes_on()
        yield one


@contextmanager
def counting(ctr: Ctr, log: Path) -> Iterator[Counter]:
    """Run a counter in the background."""
    with ctr.running(*COUNTER, flags=["--log-uri", f"file://{log}"]) as id:
        yield Counter(ctr, id, log)


@pytest.fixture
def checkpoints(ctr: Ctr) -> Iterator[list[str]]:
    """Names of checkpoint images in containerd that are removed again."""
    names: list[str] = []
    yield names
    for name in names:
        ctr("images", "rm", "--sync", name, status=None)


# -- ctr tasks checkpoint ---------------------------------------------------------------------------------------------


def test_task_checkpoint_goes_into_the_content_store_and_the_task_goes_on(
    ctr: Ctr, counter: Counter, checkpoints: list[str]
) -> None:
    name = ctr("task", "checkpoint", counter.id).strip()
    checkpoints.append(name)
    assert name in ctr("images", "ls", "-q").split()
    counter.goes_on(after=counter.lines[-1])


def test_paused_task_stays_paused_after_its_checkpoint(
    ctr: Ctr, counter: Counter, checkpoints: list[str], scratch: Path
) -> None:
    ctr("task", "pause", counter.id)
    run(["kybernate", "checkpoint", counter.id, str(scratch / "image")])
    assert ctr.status(counter.id) == "PAUSED"
    assert counter.stands_still()
    last = counter.lines[-1]
    with restored(ctr, scratch / "image", scratch / "log2") as second:
        assert second.goes_on(after=last) == last + 1
        assert counter.stands_still()
    ctr("task", "resume", counter.id)
    counter.goes_on(after=last)


@pytest.fixture
def as_stock_name(scratch: Path) -> Iterator[Ctr]:
    """Our shim under the name of containerd's own, found first in its PATH: a whole node under Kybernate.

    `ctr` of containerd 1.7 passes the options of a checkpoint on only for that name.
    """
    alias = Path("/usr/local/sbin/containerd-shim-runc-v2")
    alias.symlink_to("/usr/local/bin/containerd-shim-kybernate-v1")
    Containerd().restart()
    yield Ctr(runtime="io.containerd.runc.v2")
    alias.unlink()
    Containerd().restart()


def test_task_checkpoint_with_exit_image_path_and_work_path(as_stock_name: Ctr, scratch: Path) -> None:
    ctr = as_stock_name
    image, work = scratch / "image", scratch / "work"
    with counting(ctr, scratch / "log") as counter:
        counter.goes_on()
        flags = ["--exit", "--image-path", str(image), "--work-path", str(work)]
        ctr("task", "checkpoint", *flags, counter.id)
        eventually(lambda: ctr.status(counter.id) == "STOPPED")
        last = counter.lines[-1]
    assert (image / "kybernate-manifest.json").exists()
    assert (work / "dump.log").exists()
    with restored(ctr, image, scratch / "log2") as second:
        assert second.goes_on(after=last) == last + 1


def test_task_checkpoint_without_exit_leaves_the_task_and_the_image(as_stock_name: Ctr, scratch: Path) -> None:
    ctr = as_stock_name
    with counting(ctr, scratch / "log") as counter:
        counter.goes_on()
        ctr("task", "checkpoint", "--image-path", str(scratch / "image"), counter.id)
        counter.goes_on(after=counter.lines[-1])
    assert run(["kybernate", "inspect", "--verify", str(scratch / "image")])


# -- ctr containers checkpoint and restore ----------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--rw"], ["--rw", "--image"]], ids=["task", "rw", "rw-image"])
def test_container_checkpoint_restores_live_into_a_new_container(
    ctr: Ctr, checkpoints: list[str], flags: list[str]
) -> None:
    name, new = f"localhost:5000/checkpoint/{ctr.new_id('ck')}:1", ctr.new_id("restored")
    with ctr.running(*COUNTER) as id:
        eventually(lambda: int(ctr.exec(id, "cat", "/tmp/count") or 0) > COUNTED)
        ctr("container", "checkpoint", "--task", *flags, id, name)
        checkpoints.append(name)
        counted = int(ctr.exec(id, "cat", "/tmp/count"))
    rw = ["--rw"] if "--rw" in flags else []
    ctr("container", "restore", "--live", *rw, new, name)
    try:
        assert ctr.status(new) == "RUNNING"
        eventually(lambda: int(ctr.exec(new, "cat", "/tmp/count") or 0) > COUNTED)
        assert int(ctr.exec(new, "cat", "/tmp/count")) < counted + 400
    finally:
        ctr.remove(new)
        run(["sh", "-c", "rm -rf /tmp/ctrd-checkpoint*"])  # containerd never removes them


# -- our own command line ---------------------------------------------------------------------------------------------


@contextmanager
def restored(ctr: Ctr, image: Path, log: Path) -> Iterator[Counter]:
    """Run a container restored from `image`; its own command would fail."""
    flags = ["--annotation", f"kybernate.io/restore-from={image}", "--log-uri", f"file://{log}"]
    with ctr.running("/never/run", flags=flags) as id:
        yield Counter(ctr, id, log)


def test_command_line_checkpoints_inspects_and_restores(ctr: Ctr, counter: Counter, scratch: Path) -> None:
    image, new = scratch / "image", ctr.new_id("restored")
    answer = json.loads(run(["kybernate", "checkpoint", counter.id, str(image), "--exit", "--json"]))
    assert answer["path"] == str(image)
    eventually(lambda: ctr.status(counter.id) == "STOPPED")
    last = counter.lines[-1]
    facts = json.loads(run(["kybernate", "inspect", str(image), "--json"]))
    assert "sh" in [process["name"] for process in facts["manifest"]["processes"]]
    run(["kybernate", "inspect", "--verify", str(image)])
    run(["kybernate", "restore", str(image), "--name", new, "--log", str(scratch / "log2"), "--detach"])
    try:
        assert Counter(ctr, new, scratch / "log2").goes_on(after=last) == last + 1
        assert int(ctr.exec(new, "cat", "/tmp/count")) > last
    finally:
        ctr.remove(new)
        ctr("snapshot", "rm", new, status=None)


def test_restored_container_lives_like_any_other(ctr: Ctr, counter: Counter, scratch: Path, events: Events) -> None:
    run(["kybernate", "checkpoint", counter.id, str(scratch / "image")])
    with restored(ctr, scratch / "image", scratch / "log2") as second:
        second.goes_on()
        assert " UP LOOPBACK " in ctr.exec(second.id, "ifconfig", "lo")
        ctr("task", "pause", second.id)
        assert second.stands_still()
        ctr("task", "resume", second.id)
        assert len(ctr("task", "ps", second.id).splitlines()) >= 2
        assert ctr.metrics(second.id)
        cgroups = Path(f"/proc/{ctr.pid(second.id)}/cgroup").read_text()
        assert f"/{second.id}\n" in cgroups, cgroups
        assert counter.id not in cgroups, cgroups
        ctr("task", "kill", "-s", "SIGKILL", second.id)
        eventually(lambda: ctr.status(second.id) == "STOPPED")
        expected = ["create", "start", "exec-added", "exec-started", "exit", "paused", "resumed", "exit"]
        eventually(lambda: events.topics(second.id) == expected)
        start = next(event for topic, event in events.of(second.id) if topic == "/tasks/start")
        assert start["pid"] == ctr.pid(second.id)


def test_restore_from_environment(ctr: Ctr, counter: Counter, scratch: Path, shim_config: Path) -> None:
    run(["kybernate", "checkpoint", counter.id, str(scratch / "image")])
    log = scratch / "log2"
    shim_config.write_text("restore_from_env = true\n")  # since a container image may set it, for root as well
    flags = ["--env", f"RESTORE_FROM={scratch / 'image'}", "--log-uri", f"file://{log}"]
    with ctr.running("/never/run", flags=flags) as id:
        assert Counter(ctr, id, log).goes_on() > 1


# -- pods -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["kybernate", "kybernate-path"])
def cri(request: pytest.FixtureRequest) -> Iterator[Cri]:
    client = Cri(handler=request.param)
    yield client
    client.close()


def checkpoint_pod(cri: Cri, pod: Pod, image: Path, *flags: str) -> str:
    """Write a pod's image, and return the name by which pods of its namespace know it."""
    run(["kybernate", "checkpoint", f"default/{pod.config.metadata.name}", str(image), *flags])
    return image.name


def test_new_pod_restores_from_an_annotation_with_its_own_identity(cri: Cri, pods_image: Path) -> None:
    with cri.pod(hostname="first") as pod:
        cri.run(pod, "counter", COUNTER)
        cri.await_log(pod, "counter", str(COUNTED))
        image = checkpoint_pod(cri, pod, pods_image, "--exit")
        last, address = int(cri.log(pod, "counter")[-1]), cri.pod_ip(pod)
    with cri.pod(hostname="second", annotations={"kybernate.io/restore-from": image}) as pod:
        id = cri.run(pod, "counter", ["/never/run"])
        lines = cri.await_log(pod, "counter", str(last + COUNTED))
        assert int(lines[0]) == last + 1
        assert cri.exec(id, "hostname") == (0, "second\n")
        assert cri.pod_ip(pod) != address
        assert cri.pod_ip(pod) in cri.exec(id, "ip", "addr")[1]
        assert "second" in cri.exec(id, "cat", "/etc/hosts")[1] or cri.exec(id, "cat", "/etc/hostname") == (
            0,
            "second\n",
        )
        assert cri.state(id) == "CONTAINER_RUNNING"
        assert cri.stats(id).memory.working_set_bytes.value > 0
        cri.stop(id)
        assert cri.status(id).exit_code == 137


def test_new_pod_restores_from_its_containers_environment(cri: Cri, pods_image: Path, shim_config: Path) -> None:
    shim_config.write_text("restore_from_env = true\n")
    with cri.pod() as pod:
        cri.run(pod, "counter", COUNTER)
        cri.await_log(pod, "counter", str(COUNTED))
        image = checkpoint_pod(cri, pod, pods_image)
    with cri.pod() as pod:
        cri.run(pod, "counter", ["/never/run"], env={"RESTORE_FROM": image})
        assert int(eventually(lambda: cri.log(pod, "counter"))[0]) > COUNTED


def test_container_of_two_restores_by_its_name(cri: Cri, pods_image: Path) -> None:
    with cri.pod() as pod:
        cri.run(pod, "counter", COUNTER)
        cri.await_log(pod, "counter", str(COUNTED))
        image = checkpoint_pod(cri, pod, pods_image)
    with cri.pod(annotations={"kybernate.io/restore-from.counter": image}) as pod:
        cri.run(pod, "counter", ["/never/run"])
        fresh = cri.run(pod, "fresh", ["sh", "-c", "echo fresh; sleep 1000"])
        assert int(eventually(lambda: cri.log(pod, "counter"))[0]) > COUNTED
        cri.await_log(pod, "fresh", "fresh")
        assert cri.state(fresh) == "CONTAINER_RUNNING"


def test_other_containers_of_a_restored_pod_start_as_usual(cri: Cri, pods_image: Path) -> None:
    """Init containers, sidecars, and what `kubectl debug` adds have the pod's annotations as well."""
    with cri.pod() as pod:
        cri.run(pod, "counter", COUNTER)
        cri.await_log(pod, "counter", str(COUNTED))
        image = checkpoint_pod(cri, pod, pods_image, "--exit")
    with cri.pod(annotations={"kybernate.io/restore-from": image}) as pod:
        init = cri.run(pod, "init", ["echo", "migrated"])
        eventually(lambda: cri.state(init) == "CONTAINER_EXITED")
        sidecar = cri.run(pod, "sidecar", ["sh", "-c", "echo beside; sleep 1000"])
        cri.run(pod, "counter", ["/never/run"])
        assert int(eventually(lambda: cri.log(pod, "counter"))[0]) > COUNTED
        debugger = cri.run(pod, "debugger", ["sh", "-c", "echo shell; sleep 1000"])
        assert [cri.log(pod, name) for name in ("init", "sidecar")] == [["migrated"], ["beside"]]
        cri.await_log(pod, "debugger", "shell")
        assert [cri.state(id) for id in (sidecar, debugger)] == ["CONTAINER_RUNNING"] * 2


def test_missing_image_is_the_reason_that_the_pod_shows(cri: Cri) -> None:
    with cri.pod(annotations={"kybernate.io/restore-from": "no-such-image"}) as pod:
        id = cri.create(pod, "counter", ["/never/run"])
        with pytest.raises(grpc.RpcError, match="/default/no-such-image: no such directory"):
            cri.start(id)
        assert cri.state(id) == "CONTAINER_EXITED"


def archived(cri: Cri, archive: Path) -> int:
    """Have CRI write a counter's archive, and return a number that it had reached then; 0 where CRI writes none."""
    cri.pull(BUSYBOX)  # containerd looks the base image up by its digest in the registry
    with cri.pod() as pod:
        id = cri.run(pod, "counter", COUNTER)
        cri.await_log(pod, "counter", str(COUNTED))
        if not cri.checkpoint(id, archive):
            return 0
        last = int(cri.log(pod, "counter")[-1])
        cri.await_log(pod, "counter", str(last + 3))
    return last


def test_cri_writes_an_archive_and_the_container_continues(cri: Cri, scratch: Path) -> None:
    archive = scratch / "checkpoint.tar"
    if archived(cri, archive):
        with tarfile.open(archive) as tar:
            names = {name.removeprefix("./") for name in tar.getnames()}
        assert {"config.dump", "spec.dump", "checkpoint/kybernate-manifest.json"} <= names


@pytest.mark.parametrize("base", ["local", "registry"])
def test_cri_restores_from_an_archive(cri: Cri, cri_restore: None, scratch: Path, base: str) -> None:
    archive = scratch / "checkpoint.tar"
    last = archived(cri, archive)
    if base == "registry":
        for name in Ctr(namespace="k8s.io")("images", "ls", "-q").split():
            if "busybox" in name:
                Ctr(namespace="k8s.io")("images", "rm", "--sync", name)
    try:
        with cri.pod() as pod:
            id = cri.create(pod, "counter", [], image=str(archive))
            cri.start(id)
            # containerd puts the old log before the new one, and the dump was made somewhere before `last`
            lines = [int(line) for line in cri.await_log(pod, "counter", str(last + COUNTED))]
            assert sorted(set(lines)) == list(range(1, lines[-1] + 1))
            assert lines[-1] < last + 400
            assert cri.exec(id, "echo", "hello") == (0, "hello\n")
    finally:
        cri.pull(BUSYBOX)


def test_both_spellings_write_the_same_kind_of_image(ctr: Ctr, counter: Counter, scratch: Path) -> None:
    run(["kybernate", "checkpoint", counter.id, str(scratch / "image")])
    manifest = json.loads((scratch / "image/kybernate-manifest.json").read_text())
    assert manifest["source"]["container"] == counter.id
    assert manifest["stdio"][1:] == ["pipe", "pipe"]
    assert all(path.is_file() for path in (scratch / "image").iterdir())
    assert ctr.runtime == KYBERNATE


def test_refusal_of_a_running_checkpoint_leaves_the_first_alone(ctr: Ctr, counter: Counter, scratch: Path) -> None:
    run(["kybernate", "checkpoint", counter.id, str(scratch / "image")])
    digest = (scratch / "image/kybernate-manifest.json").read_bytes()
    with pytest.raises(CommandFailed, match="not an empty directory"):
        run(["kybernate", "checkpoint", counter.id, str(scratch / "image")])
    assert (scratch / "image/kybernate-manifest.json").read_bytes() == digest
    counter.goes_on(after=counter.lines[-1])
