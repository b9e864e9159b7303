"""Which mounts are volumes that live and die with their pod, and what the annotation says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.checkpoint.volumes.places import (
    ANNOTATION,
    SANDBOX_ID,
    Choice,
    PodVolume,
    lost,
    pod_volumes,
    renewed,
    without_huge_pages,
)
from kybernate_shim.errors import Refused
from kybernate_shim.linux.mount.mountinfo import MountPoint
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import CONTAINER_TYPE, POD_UID

UID, SANDBOX = "7f0c", "ab12"
PODS = f"/var/lib/kubelet/pods/{UID}"
EMPTY_DIR = f"{PODS}/volumes/kubernetes.io~empty-dir"
STATE = f"/run/containerd/io.containerd.grpc.v1.cri/sandboxes/{SANDBOX}"


def spec(*mounts: tuple[str, str], uid: str = UID) -> Spec:
    return Spec(
        {
            "annotations": {CONTAINER_TYPE: "container", POD_UID: uid, SANDBOX_ID: SANDBOX},
            "mounts": [{"destination": at, "source": source, "type": "bind"} for source, at in mounts],
        }
    )


@pytest.mark.parametrize("root", ["/var/lib/kubelet", "/mnt/k8s/pods/kubelet"])
def test_empty_dir_is_found_wherever_the_kubelet_has_it(root: str) -> None:
    source = f"{root}/pods/{UID}/volumes/kubernetes.io~empty-dir/data"
    assert pod_volumes(spec((source, "/data"))) == [PodVolume("data", "empty-dir", source, ("/data",))]


def test_volume_that_is_mounted_twice_is_one() -> None:
    (found,) = pod_volumes(spec((f"{EMPTY_DIR}/data", "/a"), (f"{EMPTY_DIR}/data/", "/b/")))
    assert found.destinations == ("/a", "/b")


def test_shared_memory_of_the_pod_is_a_volume() -> None:
    assert pod_volumes(spec((f"{STATE}/shm", "/dev/shm"))) == [
        PodVolume("dev-shm", "shm", f"{STATE}/shm", ("/dev/shm",))
    ]


@pytest.mark.parametrize(
    ("source", "at"),
    [
        ("/srv/data", "/data"),
        (f"{PODS}/volumes/kubernetes.io~csi/disk/mount", "/data"),
        (f"{EMPTY_DIR}/data/below", "/data"),
        ("/var/lib/kubelet/pods/of-another/volumes/kubernetes.io~empty-dir/data", "/data"),
        (f"{EMPTY_DIR}/../../../of-another/volumes/kubernetes.io~empty-dir/data", "/data"),
        ("/run/containerd/io.containerd.grpc.v1.cri/sandboxes/other/shm", "/dev/shm"),
        (f"{STATE}/shm", "/other"),
        ("/dev/shm", "/dev/shm"),
    ],
)
def test_other_directories_of_the_node_are_none(source: str, at: str) -> None:
    assert pod_volumes(spec((source, at))) == []


@pytest.mark.parametrize("annotations", [{}, {CONTAINER_TYPE: "container"}, {CONTAINER_TYPE: "container", POD_UID: ""}])
def test_container_without_a_pod_has_none(annotations: dict[str, str]) -> None:
    mounts = [{"destination": "/data", "source": f"{EMPTY_DIR}/data"}]
    assert pod_volumes(Spec({"annotations": annotations, "mounts": mounts})) == []


def test_sub_path_stands_for_its_whole_volume(tmp_path: Path) -> None:
    pod = tmp_path / "pods" / UID
    volume = pod / "volumes/kubernetes.io~empty-dir/data"
    volume.mkdir(parents=True)
    found = pod_volumes(
        spec((str(pod / "volume-subpaths/data/app/0"), "/a"), (str(pod / "volume-subpaths/disk/app/1"), "/b"))
    )
    assert found == [PodVolume("data", "empty-dir", str(volume), ("/a",))]


def test_huge_pages_are_left_out() -> None:
    volumes = pod_volumes(spec((f"{EMPTY_DIR}/pages", "/pages"), (f"{EMPTY_DIR}/data", "/data")))
    mounts = [MountPoint(1, 0, "0:1", "/", Path(f"{EMPTY_DIR}/pages"), (), (), "hugetlbfs", "none", ())]
    assert [volume.name for volume in without_huge_pages(volumes, mounts)] == ["data"]


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("", {"data", "scratch", "dev-shm"}),
        ("all", {"data", "scratch", "dev-shm"}),
        ("none", set()),
        ("data", {"data"}),
        ("data, dev-shm,", {"data", "dev-shm"}),
        ("-scratch", {"data", "dev-shm"}),
        ("data,scratch,-scratch", {"data"}),
        ("another", set()),
    ],
)
def test_annotation_chooses_volumes(text: str, taken: set[str]) -> None:
    volumes = [PodVolume(name, "empty-dir", "", ()) for name in ("data", "scratch", "dev-shm")]
    assert {volume.name for volume in volumes if Choice.of(text).takes(volume)} == taken


@pytest.mark.parametrize("text", ["*", "Data", "-", "--x", "a b", "../x", "data;scratch"])
def test_annotation_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(Refused, match=ANNOTATION):
        Choice.of(text)


def test_what_each_pod_has_for_itself_is_renewed(tmp_path: Path) -> None:
    own = {
        "/config": f"{PODS}/volumes/kubernetes.io~configmap/settings",
        "/secret": f"{PODS}/volumes/kubernetes.io~secret/keys",
        "/run/token": f"{PODS}/volumes/kubernetes.io~projected/kube-api-access-x",
        "/labels": f"{PODS}/volumes/kubernetes.io~downward-api/labels",
        "/etc/hosts": f"{PODS}/etc-hosts",
        "/dev/termination-log": f"{PODS}/containers/app/1a2b",
        "/etc/resolv.conf": f"{STATE}/resolv.conf",
        "/etc/hostname": f"{STATE}/hostname",
    }
    others = {
        "/data": f"{EMPTY_DIR}/data",
        "/disk": f"{PODS}/volumes/kubernetes.io~csi/disk/mount",
        "/foreign": "/var/lib/kubelet/pods/of-another/etc-hosts",
        "/shm": f"{STATE}/shm",
    }
    everything = spec(*((source, at) for at, source in {**own, **others}.items()))
    assert renewed(everything, tmp_path) == own.keys()


def test_links_of_the_image_on_the_way_to_a_mount_are_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    mounts = spec(
        (f"{PODS}/volumes/kubernetes.io~projected/token", "/var/run/secrets"), (f"{EMPTY_DIR}/data", "/var/run/data")
    )
    assert renewed(mounts, tmp_path) == {"/run/secrets"}
    assert lost(mounts, tmp_path, []).keys() == {"/run/data"}
    assert lost(mounts, tmp_path, ["data"]) == {}


def test_links_in_other_mounts_on_the_way_to_a_mount_are_followed(tmp_path: Path) -> None:
    (tmp_path / "rootfs").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/now").symlink_to("v1")
    mounts = spec(
        (str(tmp_path / "disk"), "/disk"),
        (f"{PODS}/volumes/kubernetes.io~projected/token", "/disk/now/token"),
        (f"{EMPTY_DIR}/data", "/disk/now/data"),
    )
    assert renewed(mounts, tmp_path / "rootfs") == {"/disk/v1/token"}
    assert lost(mounts, tmp_path / "rootfs", []).keys() == {"/disk/v1/data"}
