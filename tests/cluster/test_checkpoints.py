"""Checkpoints of pods under a real kubelet."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.cluster.kubectl import Kubectl, last
from tests.cluster.pods import RESTRICTED, container, pod
from tests.cluster.test_security import status_of
from tests.lab.cluster.cluster import Cluster
from tests.system.ctr import eventually

COUNTER = ("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done")
FROM = "kybernate.io/restore-from"
# Counts into a file as well, which it has open.
WRITER = ("sh", "-c", "exec 3>/tmp/numbers; i=0; while :; do i=$((i+1)); echo $i; echo $i >&3; sleep 0.2; done")
MEMORY = {"volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}]}
READ_ONLY = {
    "securityContext": {**RESTRICTED["securityContext"], "readOnlyRootFilesystem": True},
    "volumeMounts": [{"name": "memory", "mountPath": "/tmp"}],
}
AS: dict[str, dict[str, Any]] = {"root": {}, "user": RESTRICTED, "read-only": READ_ONLY}
CREDENTIALS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")


def identity_of(kubectl: Kubectl, name: str) -> dict[str, str]:
    """Return what the kernel knows a pod's program as."""
    found = status_of(kubectl, name)
    return {kind: found[kind] for kind in CREDENTIALS}


@pytest.mark.parametrize("fields", AS.values(), ids=AS)
def test_pod_resumes_where_another_one_stopped(kubectl: Kubectl, cluster: Cluster, fields: dict[str, Any]) -> None:
    (node, *_) = cluster.nodes
    options: dict[str, Any] = {"handler": "kybernate", **MEMORY}
    main = container("main", *WRITER, **fields)
    kubectl.apply(pod("first", containers=[main], **options))
    assert eventually(lambda: last(kubectl, "first") > 5)
    identity = identity_of(kubectl, "first")
    assert (identity["CapBnd"] == f"{0:016x}", identity["Uid"].split()[0]) == (bool(fields), "1000" if fields else "0")
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/first", "kept", "--exit")
    stopped = last(kubectl, "first")
    kubectl.phase("first", "Failed")
    main["command"] = ["/never/run"]
    kubectl.apply(pod("second", containers=[main], annotations={FROM: "kept"}, **options))
    kubectl.ready("pod/second")
    assert eventually(lambda: last(kubectl, "second") > stopped + 5)
    assert int(kubectl.logs("second").split()[0]) == stopped + 1
    assert kubectl.exec("second", "hostname") == "second\n"
    assert identity_of(kubectl, "second") == identity
    written = [int(line) for line in kubectl.exec("second", "cat", "/tmp/numbers").split()]
    assert written == list(range(1, len(written) + 1))
    assert len(written) > stopped


@pytest.mark.parametrize(
    ("fields", "give", "owner"),
    [({}, "chown 7:8 /data/file;", "7 8"), (RESTRICTED, "", "1000 1000")],
    ids=["root", "user"],
)
def test_pod_with_users_of_its_own_resumes_in_another_one(
    kubectl: Kubectl, cluster: Cluster, fields: dict[str, Any], give: str, owner: str
) -> None:
    """`hostUsers: false`: the kubelet gives each pod another range of the node's ids, and mounts volumes with a map."""
    (node, *_) = cluster.nodes
    command = ["sh", "-c", f"echo kept > /data/file; {give} {COUNTER[-1]}"]
    main = container("main", *command, volumeMounts=[{"name": "data", "mountPath": "/data"}], **fields)
    volumes = [{"name": "data", "emptyDir": {}}]
    options: dict[str, Any] = {"handler": "kybernate", "hostUsers": False, "volumes": volumes}
    kubectl.apply(pod("first", containers=[main], **options))
    assert eventually(lambda: last(kubectl, "first") > 5)
    ids = kubectl.exec("first", "cat", "/proc/self/uid_map")
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/first", "kept", "--exit")
    stopped = last(kubectl, "first")
    kubectl.phase("first", "Failed")
    main["command"] = ["/never/run"]
    kubectl.apply(pod("second", containers=[main], annotations={FROM: "kept"}, **options))
    kubectl.ready("pod/second")
    assert eventually(lambda: last(kubectl, "second") > stopped + 5)
    assert int(kubectl.logs("second").split()[0]) == stopped + 1
    assert kubectl.exec("second", "cat", "/proc/self/uid_map") != ids
    assert kubectl.exec("second", "sh", "-c", "stat -c '%u %g' /data/file; cat /data/file") == f"{owner}\nkept\n"
    assert kubectl.exec("second", "hostname") == "second\n"


def test_container_that_is_restarted_in_its_pod_undoes_nothing_of_its_sidecar(
    kubectl: Kubectl, cluster: Cluster
) -> None:
    """The kubelet starts it again, from its own image: the pod's volume is the same, and the sidecar writes to it."""
    (node, *_) = cluster.nodes
    mounts: dict[str, Any] = {"volumeMounts": [{"name": "data", "mountPath": "/data"}], **RESTRICTED}
    beside = (
        "i=0; while :; do i=$((i+1)); echo $i > /data/side; sleep 0.1; read j < /data/side;"
        " [ $j = $i ] && echo $i || echo LOST; done"
    )
    kubectl.apply(
        pod(
            "web", handler="kybernate", restartPolicy="Always", volumes=[{"name": "data", "emptyDir": {}}],
            containers=[
                container("main", "sh", "-c", f"echo kept > /data/main; {COUNTER[-1]}", **mounts),
                container("side", "sh", "-c", beside, **mounts),
            ],
        )
    )  # fmt: skip
    kubectl.ready("pod/web")
    lines = lambda name: kubectl.logs("web", f"--container={name}").split()  # noqa: E731
    assert eventually(lambda: int((lines("main") or ["0"])[-1]) > 5)
    kubectl("annotate", "pod/web", f"{FROM}=kept")
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/web/main", "kept", "--exit")
    kubectl.wait("jsonpath={.status.containerStatuses[?(@.name=='main')].restartCount}=1", "pod/web")
    kubectl.ready("pod/web")
    assert eventually(lambda: len(lines("main")) > 5)
    assert int(lines("main")[0]) > 5, "it is restored"
    seen = len(lines("side"))
    assert eventually(lambda: len(lines("side")) > seen + 10)
    assert "LOST" not in lines("side")


CONNECTED = """
import os, socket
own = socket.gethostbyname(socket.gethostname())
server = socket.create_server((own, 9000))
api = socket.create_connection((os.environ["KUBERNETES_SERVICE_HOST"], 443))
print("ready", flush=True)
client, _ = server.accept()
api.settimeout(60)
try: said = api.recv(1)
except ConnectionError: said = b""
print("address", server.getsockname()[0], "closed" if said == b"" else "open", flush=True)
while True: client, _ = server.accept()
"""


def test_listener_on_the_pods_address_and_a_connection_in_the_next_pod(kubectl: Kubectl, cluster: Cluster) -> None:
    """The listener has the new pod's address, and the connection is closed."""
    (node, *_) = cluster.nodes
    main = container("main", "python3", "-c", CONNECTED, of="python", **RESTRICTED)
    kubectl.apply(pod("first", handler="kybernate", containers=[main]))
    assert eventually(lambda: "ready" in kubectl.logs("first"))
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/first", "kept", "--exit")
    kubectl.phase("first", "Failed")
    main["command"] = ["/never/run"]
    kubectl.apply(pod("second", handler="kybernate", containers=[main], annotations={FROM: "kept"}))
    kubectl.ready("pod/second")
    address = kubectl.get("pod", "second")["status"]["podIP"]
    assert address != kubectl.get("pod", "first")["status"]["podIP"]
    with socket.create_connection((address, 9000), timeout=60):
        assert eventually(lambda: f"address {address} closed" in kubectl.logs("second"))
