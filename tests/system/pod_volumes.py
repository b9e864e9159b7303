"""Volumes of pods where the kubelet and containerd have them, made without a kubelet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kybernate.messages import cri_config_pb2 as config
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.mountinfo import below
from tests.system.cri import Pod

KUBELET = Path("/var/lib/kubelet/pods")
UPDATES = ("..2026_01_02_03_04_05.123456789", "..2026_11_12_13_14_15.987654321")  # names that the kubelet gives


@dataclass(frozen=True)
class Kubelet:
    """The directory of one pod, below the kubelet's."""

    pod: Path

    def empty_dir(self, name: str, *, memory: bool = False) -> Path:
        """Make an emptyDir volume, on the disk or in memory."""
        path = self._volume("empty-dir", name)
        path.chmod(0o777)
        if memory:
            syscalls.mount("tmpfs", str(path), "tmpfs", 0, "size=16m")
        return path

    def sub_path(self, volume: Path, name: str) -> Path:
        """Make the mount of a directory of a volume by which a container gets that alone."""
        inner, place = volume / name, self.pod / "volume-subpaths" / volume.name / "app/0"
        for directory in (inner, place):
            directory.mkdir(parents=True)
        for made in (inner, *inner.parents[: len(Path(name).parts) - 1]):  # with the volume's mode, as the kubelet does
            made.chmod(0o777)
        syscalls.mount(str(inner), str(place), "", syscalls.MS_BIND)
        return place

    def config_map(self, name: str, values: Mapping[str, str], *, update: int = 0) -> Path:
        """Make a ConfigMap's volume: values in a directory of one update, and links to the latest one."""
        path = self._volume("configmap", name)
        (path / UPDATES[update]).mkdir()
        for key, value in values.items():
            (path / UPDATES[update] / key).write_text(value)
            (path / key).symlink_to(f"..data/{key}")
        (path / "..data").symlink_to(UPDATES[update])
        return path

    def file(self, name: str, content: str) -> Path:
        """Make a file of the pod's own, such as etc-hosts."""
        path = self.pod / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o666)
        return path

    def _volume(self, kind: str, name: str) -> Path:
        path = self.pod / f"volumes/kubernetes.io~{kind}" / name
        path.mkdir(parents=True)
        return path


@contextmanager
def kubelet_of(pod: Pod) -> Iterator[Kubelet]:
    """Give a pod a directory of the kubelet's, which ends with its volumes."""
    directory = KUBELET / pod.config.metadata.uid
    try:
        yield Kubelet(directory)
    finally:
        for mount in below(directory):
            syscalls.umount(str(mount.path))
        shutil.rmtree(directory)


def mounted(source: Path, at: str, *, readonly: bool = False) -> config.Mount:
    """Return the mount of a volume or of a file of the pod's, for `create`."""
    return config.Mount(container_path=at, host_path=str(source), readonly=readonly)
