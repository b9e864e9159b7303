"""The spec of a container that comes back outside of its pod."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kybernate.node.failure import Failure
from kybernate.node.spec import for_restore, with_requester
from kybernate_shim.address import group_of
from kybernate_shim.checkpoint.image.manifest import Source
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import Requester, requester_of

IMAGE = Path("/var/lib/kybernate/checkpoints/i")


def edited(spec: dict[str, Any], *, present: bool = True) -> dict[str, Any]:
    return for_restore(spec, namespace="default", id="new", image=IMAGE, exists=lambda path: present)


def test_annotation_names_the_image() -> None:
    assert edited({})["annotations"] == {"kybernate.io/restore-from": str(IMAGE)}


def test_operation_is_that_of_this_restore_alone() -> None:
    """A container that was restored has the name of an earlier operation in its own spec."""
    old = {"annotations": {"kybernate.io/operation": "op-1", "mine": "kept"}}
    assert edited(old)["annotations"] == {"kybernate.io/restore-from": str(IMAGE), "mine": "kept"}
    new = for_restore(old, namespace="default", id="new", image=IMAGE, operation="op-2", exists=lambda path: True)
    assert new["annotations"]["kybernate.io/operation"] == "op-2"


def test_annotations_of_the_pod_are_left_out() -> None:
    old = {
        "io.kubernetes.cri.sandbox-id": "pod",
        "io.containerd.runc.v2.group": "pod",
        "kybernate.io/restore-from": "older",
        "kybernate.io/tcp": "close",
        "mine": "no order",
    }
    assert edited({"annotations": old})["annotations"] == {
        "kybernate.io/restore-from": str(IMAGE),
        "kybernate.io/tcp": "close",
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
    with pytest.raises(
        Failure, match="the container shared with its pod or its node what does not exist here"
    ) as raised:
        edited(spec, present=False)
    assert str(raised.value).splitlines()[1:] == [
        "  network namespace /run/netns/a",
        "  /var/lib/kubelet/hosts, mounted at /etc/hosts",
        "  /data/pod, mounted at /data",
    ]


def test_network_namespace_by_pid_is_not_trusted() -> None:
    with pytest.raises(Failure, match="network namespace /proc/77/ns/net"):
        edited({"linux": {"namespaces": [{"type": "network", "path": "/proc/77/ns/net"}]}})


TENANT = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-namespace": "shop"}


def of_a_tenant(**spec: Any) -> dict[str, Any]:
    annotations = TENANT | spec.pop("annotations", {})
    return for_restore(
        {"annotations": annotations, **spec},
        namespace="default",
        id="new",
        image=IMAGE,
        exists=lambda path: True,
        fixed=lambda path: not path.startswith("/tenant"),
    )


def test_root_filesystem_of_the_node_is_never_the_containers() -> None:
    assert edited({"root": {"path": "/", "readonly": True}})["root"] == {"path": "rootfs", "readonly": True}


def test_annotations_of_root_are_kept() -> None:
    assert edited({"annotations": {"mine": "kept", "org.criu.config": "/x"}})["annotations"] == {
        "kybernate.io/restore-from": str(IMAGE),
        "mine": "kept",
    }


def test_tenants_annotations_give_no_orders_to_runtimes() -> None:
    orders = {
        "run.oci.handler": "krun",
        "org.systemd.property.ExecStartPre": "/bin/sh",
        "kybernate.io/force": "true",
        "kybernate.io/restore-from.web": "other",
        "org.criu.config": "/tenant/criu.conf",
    }
    assert of_a_tenant(annotations=orders)["annotations"] == {"kybernate.io/restore-from": str(IMAGE), **TENANT}


def test_tenants_container_keeps_the_marks_by_which_the_shim_limits_its_rights(tmp_path: Path) -> None:
    new = of_a_tenant(annotations={"io.kubernetes.cri.sandbox-id": "pod", "io.kubernetes.cri.sandbox-name": "front"})
    assert requester_of(Spec(new)).is_tenant
    assert requester_of(Spec(new)).pod == "front"
    (tmp_path / "config.json").write_text(json.dumps(new))
    assert group_of(tmp_path / "config.json", "new") == "new"


def test_manifest_says_whose_the_container_is() -> None:
    source = Source("c", namespace="shop", pod="front", name="web")
    for spec in ({}, {"annotations": {"io.kubernetes.cri.sandbox-namespace": "kube-system"}}):
        assert requester_of(Spec(with_requester(spec, source))) == Requester("tenant", "shop", "front", "", "web")
    assert with_requester({"process": {}}, Source("c")) == {"process": {}}


def test_tenants_hooks_are_dropped() -> None:
    mine = {"path": "/tenant/hook", "args": ["hook"]}
    assert "hooks" not in of_a_tenant(hooks={"createRuntime": [mine], "poststop": [{"path": "/bin/sh"}]})
    assert "hooks" not in of_a_tenant(hooks={"prestart": [{"path": "/tenant/nvidia-ctk"}]})
    assert edited({"hooks": {"prestart": [mine]}})["hooks"] == {"prestart": [mine]}


def test_hooks_of_nvidia_are_kept_without_their_environment() -> None:
    hook = {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache"]}
    new = of_a_tenant(hooks={"createContainer": [{**hook, "env": ["LD_PRELOAD=/tenant/evil.so"]}]})
    assert new["hooks"] == {"createContainer": [hook]}


@pytest.mark.parametrize("kind", ["network", "pid"])
def test_tenants_namespaces_by_path_are_refused_where_they_are_needed(kind: str) -> None:
    with pytest.raises(Failure, match=f"{kind} namespace /run/netns/other"):
        of_a_tenant(linux={"namespaces": [{"type": kind, "path": "/run/netns/other"}]})


def test_tenants_other_namespaces_become_new_ones() -> None:
    namespaces = [{"type": "ipc", "path": "/run/ipcns/other"}, {"type": "user", "path": "/run/userns/other"}]
    assert of_a_tenant(linux={"namespaces": namespaces})["linux"]["namespaces"] == [{"type": "ipc"}, {"type": "user"}]


def test_tenants_mount_that_can_be_exchanged_is_refused() -> None:
    with pytest.raises(Failure, match="/tenant/scratch/link, mounted at /data: another user can replace it by a link"):
        of_a_tenant(mounts=[{"destination": "/data", "source": "/tenant/scratch/link", "type": "bind"}])


def test_what_may_be_another_pods_by_now_is_dropped() -> None:
    linux = {"netDevices": {"eth1": {}}, "intelRdt": {"closID": "other"}, "maskedPaths": ["/proc/kcore"]}
    new = of_a_tenant(linux=linux)["linux"]
    assert new == {"maskedPaths": ["/proc/kcore"], "cgroupsPath": "/default/new"}


def test_confinement_is_kept() -> None:
    process = {
        "user": {"uid": 1000},
        "capabilities": {"bounding": []},
        "noNewPrivileges": True,
        "apparmorProfile": "cri-containerd.apparmor.d",
    }
    seccomp = {"defaultAction": "SCMP_ACT_ERRNO"}
    new = of_a_tenant(process=process, linux={"seccomp": seccomp, "uidMappings": [{"size": 1}]})
    assert new["process"] == process
    assert new["linux"] == {"seccomp": seccomp, "uidMappings": [{"size": 1}], "cgroupsPath": "/default/new"}


def test_place_that_another_user_can_write_to_is_not_fixed(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    (volume / "link").symlink_to("/")
    (tmp_path / "link").symlink_to("/")

    def refused(source: Path) -> bool:
        spec = {"annotations": TENANT, "mounts": [{"destination": "/x", "source": str(source), "type": "bind"}]}
        try:
            for_restore(spec, namespace="default", id="new", image=IMAGE)
        except Failure:
            return True
        return False

    assert not refused(volume)
    assert refused(volume / "link")
    assert refused(tmp_path / "link")
    assert refused(volume / ".." / "volume")
