"""Volumes that live and die with their pod: what is in them, and what is open there, in another pod's volumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kybernate.messages import cri_config_pb2 as config
from kybernate_shim.checkpoint.image.store import read_image
from tests.system.checkpoints import PYTHON, kybernate, refused
from tests.system.cri import Cri, Pod
from tests.system.ctr import eventually
from tests.system.pod_volumes import Kubelet, kubelet_of, mounted

ANNOTATION = "kybernate.io/volumes"
# Waits for the file that only the new pod's volume has, so that what follows is of the restored program.
WAITING = """
import glob, json, os, socket, time
def said(**found): print(json.dumps(found), flush=True)
def until_told():
    print("ready", flush=True)
    while not os.path.exists("/told/now"): time.sleep(0.05)
"""
EVERYTHING = (
    WAITING
    + """
import multiprocessing, stat
from multiprocessing import shared_memory
log = open("/disk/log", "a+"); log.write("before "); log.flush()
memory = open("/memory/log", "w+"); memory.write("x" * 1000); memory.flush()
os.makedirs("/disk/work/deep"); open("/disk/work/deep/file", "w").write("kept"); os.chmod("/disk/work", 0o750)
os.link("/disk/work/deep/file", "/disk/twin"); os.symlink("work/deep/file", "/disk/link")
with open("/disk/holes", "wb") as holes: holes.truncate(1 << 30); holes.seek(1 << 29); holes.write(b"middle")
os.setxattr("/disk/twin", "user.note", b"kept")
os.chdir("/disk/work")
ghost = open("/disk/ghost", "w+"); ghost.write("ghost"); ghost.flush(); os.unlink("/disk/ghost")
shadow = open("/dev/shm/shadow", "w+"); shadow.write("shadow"); shadow.flush(); os.unlink("/dev/shm/shadow")
server = socket.socket(socket.AF_UNIX); server.bind("/disk/socket"); server.listen()
os.mkfifo("/disk/fifo"); fifo = os.open("/disk/fifo", os.O_RDWR); os.write(fifo, b"piped")
ring = shared_memory.SharedMemory(create=True, size=1 << 16, name="ring"); ring.buf[:4] = b"kept"
lock = multiprocessing.get_context("fork").Lock(); lock.acquire()
open("/dev/shm/lies", "w").write("lies there"); open("/part/file", "w").write("part")
until_told()
log.write("after"); log.flush(); log.seek(0); memory.seek(0); ghost.seek(0); shadow.seek(0)
client = socket.socket(socket.AF_UNIX); client.connect("/disk/socket")
status = os.stat("/disk/holes")
said(log=log.read(), memory=len(memory.read()), file=open("deep/file").read(), mode=stat.S_IMODE(os.stat(".").st_mode),
     twin=os.path.samefile("/disk/twin", "/disk/link"), ghost=ghost.read(), shadow=shadow.read(),
     fifo=os.read(fifo, 5).decode(), ring=bytes(ring.buf[:4]).decode(), names="ring" in os.listdir("/dev/shm"),
     lock=lock.acquire(block=False), part=open("/part/file").read(), lies=open("/dev/shm/lies").read(),
     holes=status.st_blocks < 64, size=status.st_size, accepted=bool(server.accept()),
     attribute=os.getxattr("/disk/twin", "user.note").decode())
"""
)
EXPECTED = {
    "log": "before after",
    "memory": 1000,
    "file": "kept",
    "mode": 0o750,
    "twin": True,
    "ghost": "ghost",
    "shadow": "shadow",
    "fifo": "piped",
    "ring": "kept",
    "names": True,
    "lock": False,
    "part": "part",
    "lies": "lies there",
    "holes": True,
    "size": 1 << 30,
    "accepted": True,
    "attribute": "kept",
}
OPENED = (
    WAITING
    + """
files = {name: open(name) for name in ("/config/key", "/etc/hosts", "/etc/resolv.conf")}
last = open("/dev/termination-log", "a"); last.write("x" * 100); last.flush()
files["/config/key"].read(3)
directory = os.open("/config/", os.O_RDONLY)
until_told()
last.write("said"); last.flush()
said(config=files["/config/key"].read(), hosts=files["/etc/hosts"].read(), names=sorted(os.listdir(directory)),
     resolver=len(files["/etc/resolv.conf"].read()) > 0)
"""
)
SHARING = (
    WAITING
    + """
import sys
name = sys.argv[1]
open("/told/" + name, "w").write("by " + name); open("/told/both", "a").write(name)
until_told()
said(found={one: open("/told/" + one).read() for one in sorted(os.listdir("/told"))})
"""
)


@dataclass
class Run:
    """A pod with volumes, whose containers are run by one test."""

    cri: Cri
    pod: Pod
    kubelet: Kubelet
    told: Path = field(init=False)

    def __post_init__(self) -> None:
        self.told = self.kubelet.empty_dir("told")

    def start(self, name: str, program: str, *mounts: config.Mount, arguments: tuple[str, ...] = ()) -> str:
        """Run a container with these mounts and the one by which it is told."""
        command = ["python3", "-c", program, *arguments]
        return self.cri.run(self.pod, name, command, image=PYTHON, mounts=[mounted(self.told, "/told"), *mounts])

    def answer(self, name: str) -> dict[str, Any]:
        """Tell all containers, and return what one says."""
        (self.told / "now").touch()
        lines = eventually(lambda: [line for line in self.cri.log(self.pod, name) if line.startswith("{")])
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def checkpoint(self, name: str, image: Path, *options: str) -> None:
        self.cri.await_log(self.pod, name, "ready")
        kybernate("checkpoint", f"default/{self.pod.config.metadata.name}/{name}", str(image), *options)


@pytest.fixture
def cri() -> Iterator[Cri]:
    with Cri() as client:
        yield client


@contextmanager
def running(cri: Cri, **notes: str) -> Iterator[Run]:
    """Run a pod with annotations of ours, whose names have no hyphens here."""
    annotations = {f"kybernate.io/{name.replace('_', '-')}": value for name, value in notes.items()}
    with ExitStack() as end:
        pod = cri.run_pod(annotations=annotations)
        kubelet = end.enter_context(kubelet_of(pod))
        end.callback(cri.remove_pod, pod)  # its volumes end after it
        yield Run(cri, pod, kubelet)


def moved_away_and_back(image: Path, archive: Path) -> None:
    """Let an image come back from an archive, with its volumes, and from no other place."""
    name = f"{image.parent.name}/{image.name}"
    assert "dev-shm" in kybernate("inspect", name)
    kybernate("export", name, str(archive))
    shutil.rmtree(image)
    kybernate("pull", str(archive), image.name, "--yes")


def test_all_of_the_pods_own_volumes_comes_back(cri: Cri, pods_image: Path, tmp_path: Path) -> None:
    def start(run: Run) -> None:
        disk, memory, parts = (run.kubelet.empty_dir(n, memory=n == "memory") for n in ("disk", "memory", "parts"))
        part = run.kubelet.sub_path(parts, "of/it")
        run.start("app", EVERYTHING, mounted(disk, "/disk"), mounted(memory, "/memory"), mounted(part, "/part"))

    with running(cri) as run:
        start(run)
        run.checkpoint("app", pods_image, "--exit")
    saved = {volume.name: volume for volume in read_image(pods_image).manifest.volumes}
    assert saved.keys() == {"told", "disk", "memory", "parts", "dev-shm"}
    assert saved["disk"].bytes < 1 << 20, "holes are not in the image"
    moved_away_and_back(pods_image, tmp_path / "image.tar")
    with running(cri, restore_from=pods_image.name) as run:
        start(run)
        assert run.answer("app") == EXPECTED


def test_files_that_each_pod_has_for_itself_are_the_new_pods(cri: Cri, pods_image: Path) -> None:
    def start(run: Run, value: str, update: int) -> None:
        values = run.kubelet.config_map("settings", {"key": value}, update=update)
        hosts, last = run.kubelet.file("etc-hosts", f"# {value}"), run.kubelet.file("containers/app/1", "")
        mounts = mounted(values, "/config", readonly=True), mounted(hosts, "/etc/hosts")
        run.start("app", OPENED, *mounts, mounted(last, "/dev/termination-log"))

    with running(cri) as run:
        start(run, "old", 0)
        run.checkpoint("app", pods_image, "--exit")
    with running(cri, restore_from=pods_image.name) as run:
        start(run, "new and longer", 1)
        found = run.answer("app")
        assert (run.kubelet.pod / "containers/app/1").read_text() == "said"
    assert found["config"] == " and longer"
    assert found["hosts"] == "# new and longer"
    assert found["names"] == ["..2026_11_12_13_14_15.987654321", "..data", "key"]
    assert found["resolver"]


def test_second_restore_of_a_pod_changes_nothing_in_its_volumes(cri: Cri, pods_image: Path) -> None:
    """Each of the two images has the volume as it was at another time."""
    images = {name: pods_image / name for name in ("one", "two")}
    pods_image.mkdir(mode=0o700)
    with running(cri) as run:
        for name, image in images.items():
            run.start(name, SHARING, arguments=(name,))
            run.checkpoint(name, image)
    choices = {f"restore_from.{name}": f"{pods_image.name}/{name}" for name in images}
    with running(cri, **choices) as run:
        run.start("one", SHARING)
        (run.told / "one").write_text("by one, later")
        run.start("two", SHARING)
        found = run.answer("two")["found"]
    assert found == {"both": "one", "now": "", "one": "by one, later", "two": "by two"}


RESTARTED = (
    WAITING
    + """
for name in ("changed", "removed"): open("/told/" + name, "w").write("at the checkpoint")
open("/dev/shm/changed", "w").write("at the checkpoint")
until_told()
def read(path): return open(path).read()
said(told={name: read("/told/" + name) for name in sorted(os.listdir("/told"))}, shm=read("/dev/shm/changed"))
"""
)


def test_container_that_is_restarted_in_its_pod_undoes_nothing_there(cri: Cri, pods_image: Path) -> None:
    """What a sidecar has written, made and removed since the checkpoint stays as it is."""
    with running(cri, **{"restore_from.again": pods_image.name}) as run:
        run.start("app", RESTARTED)
        run.checkpoint("app", pods_image, "--exit")
        script = "cd /told; rm removed; for file in changed made /dev/shm/changed; do echo -n since > $file; done"
        command = ["sh", "-c", f"{script}; echo done; sleep 1000"]
        id = cri.run(run.pod, "sidecar", command, mounts=[mounted(run.told, "/told")])
        cri.await_log(run.pod, "sidecar", "done")
        run.start("again", RESTARTED)
        found = run.answer("again")
        assert found == {"told": {"changed": "since", "made": "since", "now": ""}, "shm": "since"}
        assert cri.state(id) == "CONTAINER_RUNNING"


def test_volumes_are_chosen_for_one_image(cri: Cri, pods_image: Path) -> None:
    with running(cri) as run:
        (run.told / "file").touch()
        run.start("app", WAITING + "until_told()\nsaid()")
        cri.await_log(run.pod, "app", "ready")
        name = f"default/{run.pod.config.metadata.name}/app"
        assert "'tld' is not one of" in refused("kybernate", "checkpoint", name, str(pods_image), "--volumes", "tld")
        run.checkpoint("app", pods_image, "--volumes=-told")
        assert [volume.name for volume in read_image(pods_image).manifest.volumes] == ["dev-shm"]


def test_volumes_beyond_the_limit_are_refused_by_name(cri: Cri, pods_image: Path, shim_config: Path) -> None:
    shim_config.write_text('volumes_limit = "1MiB"')
    with running(cri) as run:
        (run.told / "large").write_bytes(bytes(2 << 20))
        id = run.start("app", WAITING + "until_told()\nsaid()")
        cri.await_log(run.pod, "app", "ready")
        name = f"default/{run.pod.config.metadata.name}/app"
        words = refused("kybernate", "checkpoint", name, str(pods_image), "--exit")
        assert "told 2 MiB" in words
        assert f"{ANNOTATION}: -told" in words
        assert cri.state(id) == "CONTAINER_RUNNING"


def test_open_file_of_a_volume_that_is_left_is_refused(cri: Cri, pods_image: Path) -> None:
    with running(cri, volumes="-told") as run:
        id = run.start("app", WAITING + "file = open('/told/file', 'w')\nuntil_told()\nsaid()")
        cri.await_log(run.pod, "app", "ready")
        name = f"default/{run.pod.config.metadata.name}/app"
        words = refused("kybernate", "checkpoint", name, str(pods_image), "--exit")
        assert "/told/file" in words
        assert ANNOTATION in words
        assert cri.state(id) == "CONTAINER_RUNNING"
