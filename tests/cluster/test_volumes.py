"""Volumes of every kind that needs no driver, as containers see them and as they change. Of both handlers."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, image, pod
from tests.lab.cluster.cluster import Cluster
from tests.system.ctr import eventually

GROUP = 3000


def mounted(*names: str, **fields: Any) -> dict[str, Any]:
    return {"volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in names], **fields}


def configured(kubectl: Kubectl) -> None:
    kubectl("create", "configmap", "settings", "--from-literal=key=first", "--from-literal=other=same")
    kubectl("create", "secret", "generic", "hidden", "--from-literal=password=very secret")


def test_volumes_have_their_content_modes_and_media(kubectl: Kubectl, handler: str) -> None:
    configured(kubectl)
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": 600, "audience": "somewhere"}}
    downward = {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}}
    volumes: list[dict[str, Any]] = [
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "settings", "configMap": {"name": "settings", "defaultMode": 0o440}},
        {"name": "hidden", "secret": {"secretName": "hidden", "items": [{"key": "password", "path": "a/b"}]}},
        {"name": "all", "projected": {"sources": [{"configMap": {"name": "settings"}}, token, downward]}},
        {"name": "node", "hostPath": {"path": "/tmp", "type": "Directory"}},
        {"name": "whole", "image": {"reference": image(), "pullPolicy": "IfNotPresent"}},
    ]
    main = container("main", **mounted(*(volume["name"] for volume in volumes)))
    main["volumeMounts"] += [
        {"name": "settings", "mountPath": "/etc/one-key", "subPath": "key"},
        {"name": "disk", "mountPath": "/below", "subPathExpr": "$(POD)/logs"},
        {"name": "disk", "mountPath": "/read-only", "readOnly": True},
    ]
    main["env"] = [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    kubectl.apply(pod("volumes", handler=handler, containers=[main], volumes=volumes, labels={"some": "label"}))
    kubectl.ready("pod/volumes")
    said = lambda script: kubectl.exec("volumes", "sh", "-c", script).strip()  # noqa: E731
    assert said("cat /settings/key /hidden/a/b /all/key /etc/one-key") == "firstvery secretfirstfirst"
    assert said("stat -L -c %a /settings/key") == "440"
    assert said("cat /all/labels") == 'some="label"'
    claims = json.loads(base64.urlsafe_b64decode(said("cut -d. -f2 /all/token") + "=="))
    assert (claims["aud"], claims["kubernetes.io"]["pod"]["name"]) == (["somewhere"], "volumes")
    assert said("grep -c ' /memory tmpfs' /proc/mounts") == "1"
    assert said("echo x >/disk/file; ls /read-only") in ("file\nvolumes", "volumes\nfile")
    assert said("touch /read-only/no 2>&1 || echo refused").endswith("refused")
    assert said("echo x >/below/log; cat /disk/volumes/logs/log") == "x"
    assert said("head -c 2000000 /dev/zero >/memory/large 2>/dev/null || echo full").endswith("full")
    assert said("/whole/bin/busybox echo of the image") == "of the image"
    assert said("touch /whole/no 2>&1 || echo refused").endswith("refused")


def test_contents_that_change_reach_the_running_pod(kubectl: Kubectl, handler: str) -> None:
    """ConfigMap and Secret: kubelet writes a new directory and moves a link to it. test_disruptions.py has tokens."""
    configured(kubectl)
    volumes = [
        {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "hidden", "secret": {"secretName": "hidden"}},
    ]
    main = container("main", **mounted("settings", "hidden"))
    kubectl.apply(pod("changes", handler=handler, containers=[main], volumes=volumes))
    kubectl.ready("pod/changes")
    kubectl("patch", "configmap", "settings", "--patch", '{"data": {"key": "second"}}')
    kubectl("patch", "secret", "hidden", "--patch", '{"stringData": {"password": "changed"}}')
    read = ("sh", "-c", "cat /settings/key /hidden/password")
    kubectl("annotate", "pod", "changes", "look=now")  # kubelet syncs a pod that changes immediately
    assert eventually(lambda: kubectl.exec("changes", *read) == "secondchanged", seconds=120, pause=0.5)


def disk_of_node(kubectl: Kubectl, name: str, node: str, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a volume that is a directory of a node, and the claim of it: of those, kubelet changes the owners."""
    size, modes = {"storage": "1Mi"}, ["ReadWriteOnce"]
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    volume = {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"{kubectl.namespace}-{name}"},
        "spec": {
            "capacity": size, "accessModes": modes, "local": {"path": path}, "storageClassName": "",
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }  # fmt: skip
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {
            "accessModes": modes, "resources": {"requests": size}, "storageClassName": "",
            "volumeName": f"{kubectl.namespace}-{name}",
        },
    }  # fmt: skip
    return volume, claim


def test_group_of_a_volume_is_changed_always_or_where_its_root_has_another_one(
    kubectl: Kubectl, handler: str, cluster: Cluster
) -> None:
    node = cluster.nodes[0]
    names = ("right", "wrong")  # by the group of their roots
    for name in names:
        path = f"/var/lib/disks/{kubectl.namespace}-{name}"
        node.run("sh", "-c", f"mkdir -p {path}/inner; touch {path}/inner/file; chmod -R 660 {path}/inner/file")
        node.run("sh", "-c", f"chown 0:{GROUP if name == 'right' else 0} {path}; chmod 2770 {path}")
        kubectl.apply(*disk_of_node(kubectl, name, node.name, path))
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in names]
    try:
        for policy, right in (("OnRootMismatch", 0), ("Always", GROUP)):
            context = {"runAsUser": 1000, "fsGroup": GROUP, "fsGroupChangePolicy": policy}
            main = container("main", **mounted(*names))
            kubectl.apply(pod("owns", handler=handler, containers=[main], volumes=volumes, securityContext=context))
            kubectl.ready("pod/owns")
            groups = kubectl.exec("owns", "stat", "-c", "%g", "/right/inner/file", "/wrong/inner/file").split()
            assert groups == [str(right), str(GROUP)], policy
            kubectl.exec("owns", "sh", "-c", "echo x >/wrong/inner/file")
            kubectl.delete("pod/owns")
    finally:
        kubectl("delete", "--wait=false", *(f"pv/{kubectl.namespace}-{name}" for name in names))


def test_two_containers_share_volumes_and_memory(kubectl: Kubectl, handler: str) -> None:
    shm = [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "data", "emptyDir": {}}]
    mounts = {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "data", "mountPath": "/data"}]}
    writer = container("writer", "sh", "-c", "echo a >/dev/shm/a; echo b >/data/b; sleep 1000", **mounts)
    reader = container("reader", "sleep", "1000", **mounts)
    kubectl.apply(pod("shared", handler=handler, containers=[writer, reader], volumes=shm))
    kubectl.ready("pod/shared")
    read = ("sh", "-c", "cat /dev/shm/a /data/b")
    assert eventually(lambda: kubectl.exec("shared", *read, container="reader") == "a\nb\n")


def test_mount_propagation_reaches_the_container(kubectl: Kubectl, handler: str) -> None:
    """From a privileged container to the node, and on into another container."""
    host = [{"name": "host", "hostPath": {"path": "/var/lib/propagated", "type": "DirectoryOrCreate"}}]
    mount = lambda way: {"volumeMounts": [{"name": "host", "mountPath": "/host", "mountPropagation": way}]}  # noqa: E731
    mounting = (
        "mkdir -p /host/$0 && mount -t tmpfs mine /host/$0 && touch /host/$0/there; trap 'umount /host/$0; exit' TERM;"
    )
    giver = container(
        "giver", "sh", "-c", mounting + " while :; do sleep 0.1; done", handler, securityContext={"privileged": True},
        **mount("Bidirectional"),
    )  # fmt: skip
    taker = container("taker", "sleep", "1000", **mount("HostToContainer"))
    kubectl.apply(pod("propagates", handler=handler, containers=[giver, taker], volumes=host))
    kubectl.ready("pod/propagates")
    look = ("sh", "-c", f"ls /host/{handler} || true")
    assert eventually(lambda: kubectl.exec("propagates", *look, container="taker") == "there\n", seconds=30)
