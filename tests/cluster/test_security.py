"""What a pod's security context makes of its processes, and namespaces that it shares. The same under both handlers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, pod
from tests.lab import images, oci
from tests.lab.cluster.cluster import Cluster
from tests.lab.root import REGISTRY_STORAGE
from tests.system.busybox_images import busybox_image
from tests.system.ctr import eventually

# The image's own accounts have uid 1000 in a group that no pod names.
MEMBER = {
    "etc/passwd": images.ACCOUNTS["etc/passwd"] + b"user:x:1000:1000:user:/home:/bin/sh\n",
    "etc/group": images.ACCOUNTS["etc/group"] + b"user:x:1000:\nmembers:x:5000:user\n",
}
SECCOMP = "/var/lib/kubelet/seccomp"  # where kubelet's profiles of type Localhost are
REFUSES_MKDIR = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95}],
}


def status_of(kubectl: Kubectl, name: str, container: str = "") -> dict[str, str]:
    """Return /proc/1/status of a container whose processes have no others' in sight."""
    lines = kubectl.exec(name, "cat", "/proc/1/status", container=container).splitlines()
    return {key: " ".join(value.split()) for key, value in (line.split(":", 1) for line in lines if ":" in line)}


IDENTITY = {"runAsUser": 1000, "runAsGroup": 2000, "runAsNonRoot": True, "fsGroup": 3000, "supplementalGroups": [4000]}
BARE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


@pytest.fixture(scope="module")
def members() -> str:
    """The name of an image, in the registry of the lab, whose user 1000 is a member of group 5000."""
    oci.write_registry(busybox_image(MEMBER, name="members"), Path("/", REGISTRY_STORAGE))
    return "members"


@pytest.mark.parametrize(("policy", "groups"), [("Merge", "2000 3000 4000 5000"), ("Strict", "2000 3000 4000")])
def test_user_groups_and_what_they_may(kubectl: Kubectl, handler: str, members: str, policy: str, groups: str) -> None:
    context = {**IDENTITY, "supplementalGroupsPolicy": policy, "seccompProfile": {"type": "RuntimeDefault"}}
    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    main = container("main", "sleep", "1000", of=members, securityContext=BARE, **mounts)
    kubectl.apply(
        pod(
            "user",
            handler=handler,
            securityContext=context,
            containers=[main],
            volumes=[{"name": "data", "emptyDir": {}}],
        )
    )
    kubectl.ready("pod/user")
    found = status_of(kubectl, "user")
    assert (found["Uid"], found["Gid"]) == ("1000 1000 1000 1000", "2000 2000 2000 2000")
    assert found["Groups"] == groups
    assert {found[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    assert kubectl.exec("user", "sh", "-c", "touch /data/mine && stat -c '%u %g' /data/mine").split() == [
        "1000",
        "3000",
    ]
    assert "Read-only file system" in kubectl.refused("exec", "user", "--", "touch", "/no")
    assert "Operation not permitted" in kubectl.refused("exec", "user", "--", "chown", "0:0", "/data/mine")


def test_program_of_root_is_refused_where_it_must_not_be(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(pod("root", handler=handler, securityContext={"runAsNonRoot": True}))
    reason = "jsonpath={.status.containerStatuses[0].state.waiting.reason}=CreateContainerConfigError"
    kubectl.wait(reason, "pod/root")
    assert "runAsNonRoot" in kubectl.events()


def test_capabilities_seccomp_and_proc(kubectl: Kubectl, handler: str) -> None:
    added = {"capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}, "seccompProfile": {"type": "Unconfined"}}
    containers = [
        container("added", "sleep", "1000", securityContext=added),
        container("privileged", "sleep", "1000", securityContext={"privileged": True}),
        container("plain", "sleep", "1000", securityContext={"seccompProfile": {"type": "RuntimeDefault"}}),
    ]
    kubectl.apply(pod("powers", handler=handler, containers=containers))
    kubectl.ready("pod/powers")
    found = {name: status_of(kubectl, "powers", name) for name in ("added", "privileged", "plain")}
    assert (int(found["added"]["CapEff"], 16), found["added"]["Seccomp"]) == (1 << 12, "0")
    assert int(found["privileged"]["CapEff"], 16) == int(found["privileged"]["CapBnd"], 16) > 1 << 20
    assert found["plain"]["Seccomp"] == "2"
    masked = ("sh", "-c", "head -c 1 /proc/timer_list | wc -c")
    assert kubectl.exec("powers", *masked, container="privileged").split() == ["1"]
    assert kubectl.exec("powers", *masked, container="plain").split() == ["0"]
    assert "proc /proc/sys proc ro," in kubectl.exec("powers", "cat", "/proc/mounts", container="plain")
    assert kubectl.exec("powers", "ls", "/dev/kmsg", container="privileged") == "/dev/kmsg\n"


def test_seccomp_profile_of_the_node(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    """A file of kubelet's directory, whose refusal has an error number that no other one has."""
    for node in cluster.nodes:
        profile = node.path(f"{SECCOMP}/refuses-mkdir.json")
        profile.parent.mkdir(exist_ok=True)
        profile.write_text(json.dumps(REFUSES_MKDIR))
    ours = {"seccompProfile": {"type": "Localhost", "localhostProfile": "refuses-mkdir.json"}}
    absent = {"seccompProfile": {"type": "Localhost", "localhostProfile": "absent.json"}}
    confined = container("confined", "sleep", "1000", securityContext=ours)
    kubectl.apply(
        pod("local", handler=handler, containers=[confined, container("plain", "sleep", "1000")]),
        pod("absent", handler=handler, securityContext=absent),
    )
    kubectl.ready("pod/local")
    assert status_of(kubectl, "local", "confined")["Seccomp"] == "2"
    mkdir = ("exec", "local", "--container=confined", "--", "mkdir", "/tmp/new")
    assert "Operation not supported" in kubectl.refused(*mkdir)
    kubectl.exec("local", "touch", "/tmp/new", container="confined")
    kubectl.exec("local", "mkdir", "/tmp/new", container="plain")
    eventually(lambda: "absent.json" in kubectl.events(), seconds=60)
    kubectl.phase("absent", "Pending")


@pytest.mark.parametrize("proc", ["Default", "Unmasked"])
def test_users_of_a_pod_of_its_own(kubectl: Kubectl, handler: str, proc: str) -> None:
    """hostUsers: false, and the /proc that only such a pod may have whole."""
    main = container("main", "sleep", "1000", securityContext={"procMount": proc})
    kubectl.apply(pod("users", handler=handler, containers=[main], hostUsers=False))
    kubectl.ready("pod/users")
    inside, outside, length = kubectl.exec("users", "cat", "/proc/self/uid_map").split()
    assert (inside, length) == ("0", "65536")
    assert int(outside) >= 65536
    assert kubectl.exec("users", "id", "-u") == "0\n"
    masked = kubectl.exec("users", "sh", "-c", "grep -c /proc/ /proc/self/mountinfo || true")
    assert (int(masked) > 1) is (proc == "Default")


def test_namespaces_of_the_node_and_of_the_pod(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    kubectl.apply(
        pod("net", handler=handler, hostNetwork=True),
        pod("pid", handler=handler, hostPID=True),
        pod("ipc", handler=handler, hostIPC=True),
        pod("shared", handler=handler, shareProcessNamespace=True,
            containers=[container("one", "sleep", "11111"), container("two", "sleep", "22222")]),
    )  # fmt: skip
    kubectl.ready("pod/net", "pod/pid", "pod/ipc", "pod/shared")
    (node,) = {one["spec"]["nodeName"] for one in kubectl.items("pods")}
    machine = cluster.node(node)

    def of_node(kind: str) -> str:
        return machine.run("readlink", f"/proc/1/ns/{kind}").strip()

    def of_pod(name: str, kind: str) -> str:
        return kubectl.exec(name, "readlink", f"/proc/self/ns/{kind}").strip()

    assert of_pod("net", "net") == of_node("net") != of_pod("pid", "net")
    assert of_pod("pid", "pid") == of_node("pid") != of_pod("net", "pid")
    assert of_pod("ipc", "ipc") == of_node("ipc") != of_pod("net", "ipc")
    assert "kubelet" in kubectl.exec("pid", "ps", "-o", "args")
    assert "sleep 22222" in kubectl.exec("shared", "ps", "-o", "args", container="one")
    assert kubectl.get("pod", "net")["status"]["podIP"] == kubectl.get("pod", "net")["status"]["hostIP"]


def test_sysctls_hostname_and_names(kubectl: Kubectl, handler: str) -> None:
    spec: dict[str, Any] = {
        "hostname": "called", "subdomain": "here", "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["alias.test"]}],
        "dnsPolicy": "None", "dnsConfig": {"nameservers": ["192.0.2.53"], "searches": ["found.test"]},
        "securityContext": {"sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "1"}]},
    }  # fmt: skip
    kubectl.apply(pod("named", handler=handler, **spec))
    kubectl.ready("pod/named")
    assert kubectl.exec("named", "hostname") == "called\n"
    assert "192.0.2.1\talias.test" in kubectl.exec("named", "cat", "/etc/hosts")
    assert kubectl.exec("named", "cat", "/etc/resolv.conf").split() == [
        "search",
        "found.test",
        "nameserver",
        "192.0.2.53",
    ]
    assert kubectl.exec("named", "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start") == "1\n"


def test_runtime_class_has_the_pods_handler(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    """Not another one: the shim that runs it is the one of the handler."""
    seconds = str(30000 + len(handler))  # the pod of the other handler may not have ended yet
    kubectl.apply(pod("which", "sleep", seconds, handler=handler))
    kubectl.ready("pod/which")
    machine = cluster.node(kubectl.get("pod", "which")["spec"]["nodeName"])
    said = lambda: machine.run("sh", "-c", f"ps -eo ppid,args | grep '[s]leep {seconds}'").split()  # noqa: E731
    parent = eventually(said)[0]
    name = machine.run("sh", "-c", f"tr '\\0' ' ' </proc/{parent}/cmdline")
    assert ("containerd-shim-kybernate-v1" in name) is (handler == "kybernate"), name
