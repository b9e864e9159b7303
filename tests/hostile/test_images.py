"""Images that are made to stop or to swell their reader: a refusal within seconds, and the pod lives on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kybernate_shim.checkpoint.compat import read_host
from kybernate_shim.checkpoint.criu import images
from kybernate_shim.checkpoint.criu.images import COMMON
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.manifest import NAME, Manifest, Program, Source
from kybernate_shim.checkpoint.image.store import payload_names, write_manifest
from kybernate_shim.linux.cgroup.cgroup import hierarchy_version
from kybernate_shim.messages import criu_pb2 as criu
from tests.hostile.tenant import Tenant
from tests.system.checkpoints import refused, shim_of
from tests.system.ctr import Ctr
from tests.unit.checkpoint.criu.test_criu_images import write

IMAGES = Path("/var/lib/kybernate/checkpoints")
MOST_RSS = 160 << 20  # of a daemon that has loaded what it needs for restores; the attacks took 700 MiB and more
ZEROS = 400 << 20
SPARSE = 700 << 20


@dataclass
class Neighbour:
    """A container whose daemon serves those of its group, too."""

    ctr: Ctr
    id: str
    group: list[str]

    def attacked(self, image: Path) -> str:
        """Start a container from the image next to it, and return the reason for which it is refused."""
        flags = [*self.group, "--annotation", f"kybernate.io/restore-from={image}", "-d"]
        id = self.ctr.new_id()
        try:
            return refused(*self.ctr.run_argv(id, "false", flags=flags))
        finally:
            self.ctr("task", "rm", "-f", id, status=None)
            self.ctr("container", "rm", id, status=None)

    def assert_unharmed(self) -> None:
        status = Path(f"/proc/{shim_of(self.ctr, self.id).pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
        assert peak < MOST_RSS, f"the daemon took {peak >> 20} MiB"
        assert self.ctr.exec(self.id, "echo", "alive") == "alive\n"


@pytest.fixture
def neighbour(ours: Ctr) -> Iterator[Neighbour]:
    group = ["--annotation", f"io.containerd.runc.v2.group={ours.new_id('group')}"]
    with ours.running("sleep", "600", flags=group) as id:
        yield Neighbour(ours, id, group)


def forged(directory: Path) -> Path:
    """Make an image with all that is read of one before CRIU."""
    directory.mkdir(exist_ok=True)
    write(directory / "pstree.img", (COMMON, images.PSTREE), criu.Process(pid=1).SerializeToString())
    write(directory / "files.img", (COMMON, images.FILES))
    write(directory / "mountpoints-1.img", (COMMON, images.MOUNTS))
    return directory


def finished(directory: Path) -> Path:
    """Write the manifest of what is in the directory."""
    with Digester() as digester:
        files = digester.files(directory, payload_names(directory))
    host = read_host(hierarchy_version())
    manifest = Manifest(
        "id", "2026-01-02T03:04:05Z", Source("c"), Program("runc", "1"), Program("criu", "4"), host, files=files
    )
    write_manifest(directory, manifest, durable=False)
    return directory


def fifo(directory: Path) -> None:
    os.mkfifo(directory / NAME)


def link_to_a_sparse_file(directory: Path) -> None:
    sparse_file(directory)
    (directory / NAME).rename(directory / "sparse")
    (directory / NAME).symlink_to("sparse")


def sparse_file(directory: Path) -> None:
    (directory / NAME).touch()
    os.truncate(directory / NAME, SPARSE)


@pytest.mark.parametrize(
    ("lay", "reason"),
    [
        (fifo, "not a regular file"),
        (link_to_a_sparse_file, "not a regular file"),
        (sparse_file, "larger than 33554432 bytes"),
    ],
)
def test_manifest_that_stops_its_reader_is_refused(
    neighbour: Neighbour, tmp_path: Path, lay: Callable[[Path], None], reason: str
) -> None:
    lay(tmp_path)
    assert reason in neighbour.attacked(tmp_path)
    neighbour.assert_unharmed()


def test_manifest_of_deep_nesting_is_refused(neighbour: Neighbour, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("[" * 400_000)
    assert "not JSON" in neighbour.attacked(tmp_path)
    neighbour.assert_unharmed()


@contextmanager
def name_of(tenant: Tenant) -> Iterator[tuple[str, Path]]:
    """Give the tenant's namespace an image, as far as its place goes."""
    place = IMAGES / tenant.namespace / "forged"
    place.mkdir(mode=0o700, parents=True)
    for directory in (IMAGES, place.parent):
        directory.chmod(0o700)
    try:
        yield place.name, place
    finally:
        shutil.rmtree(place.parent)


def test_pod_with_an_image_that_stops_its_reader_can_be_stopped(tenant: Tenant) -> None:
    """The fixture stops and removes the sandbox, which containerd could not once the daemon waited for the FIFO."""
    pod = tenant.pod()
    with name_of(tenant) as (name, place):
        fifo(place)
        assert "not a regular file" in tenant.refused(pod, "c", annotations={"kybernate.io/restore-from": name})
        keeper = tenant.cri.run(pod, "keeper", ["sleep", "600"])
        assert tenant.cri.state(keeper) == "CONTAINER_RUNNING"


def test_zeros_for_mounts_are_refused(neighbour: Neighbour, tmp_path: Path) -> None:
    os.truncate(forged(tmp_path) / "mountpoints-1.img", ZEROS)
    assert "mountpoints-1.img: larger than 67108864 bytes" in neighbour.attacked(finished(tmp_path))
    neighbour.assert_unharmed()


def test_millions_of_empty_mounts_are_refused(neighbour: Neighbour, tmp_path: Path) -> None:
    os.truncate(forged(tmp_path) / "mountpoints-1.img", 60 << 20)
    assert "more than 16384 entries" in neighbour.attacked(finished(tmp_path))
    neighbour.assert_unharmed()
    assert not psutil.Process(shim_of(neighbour.ctr, neighbour.id).pid).children()[1:], "a reader is left"


def test_mount_point_on_the_host_is_not_made(neighbour: Neighbour, tmp_path: Path) -> None:
    image = tmp_path / "image"
    mount = criu.Mount(type=5, id=9, mountpoint=f"/../../../../../../../..{tmp_path}/made", root="/")
    write(forged(image) / "mountpoints-1.img", (COMMON, images.MOUNTS), mount.SerializeToString())
    assert "is not a path where a container can have a mount" in neighbour.attacked(finished(image))
    assert not (tmp_path / "made").exists()
    neighbour.assert_unharmed()
