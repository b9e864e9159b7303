"""The spec of a container that comes back outside of its pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kybernate.node.spec import PodGone, for_restore

IMAGE = Path("/var/lib/kybernate/checkpoints/i")


def edited(spec: dict[str, Any], *, present: bool = True) -> dict[str, Any]:
    return for_restore(spec, namespace="default", id="new", image=IMAGE, exists=lambda path: present)


def test_annotation_names_the_image() -> None:
    assert edited({})["annotations"] == {"kybernate.io/restore-from": str(IMAGE)}


def test_annotations_of_the_pod_are_left_out() -> None:
    old = {
        "io.kubernetes.cri.sandbox-id": "pod",
        "io.containerd.runc.v2.group": "pod",
        "kybernate.io/restore-from": "older",
        "kybernate.io/tcp": "close",
        "mine": "kept",
    }
    assert edited({"annotations": old})["annotations"] == {
        "kybernate.io/restore-from": str(IMAGE),
        "kybernate.io/tcp": "close",
        "mine": "kept",
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/default/counter", "/default/new"),
        ("kubelet-kubepods-pod1.slice:cri-containerd:counter", "system.slice:kybernate:new"),
        ("", "/default/new"),
    ],
)
def test_cgroup_is_its_own(old: str, new: str) -> None:
    assert edited({"linux": {"cgroupsPath": old}})["linux"]["cgroupsPath"] == new


def test_spec_of_the_image_stays_as_it_is() -> None:
    spec: dict[str, Any] = {"linux": {"cgroupsPath": "/a/b", "namespaces": [{"type": "ipc", "path": "/proc/1/ns/ipc"}]}}
    edited(spec)
    assert spec["linux"] == {"cgroupsPath": "/a/b", "namespaces": [{"type": "ipc", "path": "/proc/1/ns/ipc"}]}


def test_namespaces_by_pid_become_new_ones() -> None:
    namespaces = [{"type": "ipc", "path": "/proc/77/ns/ipc"}, {"type": "network", "path": "/run/netns/a"}]
    new = edited({"linux": {"namespaces": namespaces}})
    assert new["linux"]["namespaces"] == [{"type": "ipc"}, {"type": "network", "path": "/run/netns/a"}]


def test_what_is_missing_is_named_at_once() -> None:
    spec = {
        "mounts": [
            {"destination": "/etc/hosts", "source": "/var/lib/kubelet/hosts", "type": "bind"},
            {"destination": "/data", "source": "/data/pod", "options": ["rbind", "ro"]},
            {"destination": "/proc", "source": "proc", "type": "proc"},
        ],
        "linux": {"namespaces": [{"type": "network", "path": "/run/netns/a"}, {"type": "uts", "path": "/run/uts"}]},
    }
    with pytest.raises(PodGone) as raised:
        edited(spec, present=False)
    assert str(raised.value).splitlines()[1:] == [
        "  network namespace /run/netns/a",
        "  /var/lib/kubelet/hosts, mounted at /etc/hosts",
        "  /data/pod, mounted at /data",
    ]


def test_network_namespace_by_pid_is_not_trusted() -> None:
    with pytest.raises(PodGone, match="network namespace /proc/77/ns/net"):
        edited({"linux": {"namespaces": [{"type": "network", "path": "/proc/77/ns/net"}]}})
