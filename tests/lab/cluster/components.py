"""The programs of a cluster with their flags, and how each shows that it serves."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from tests.lab import containerd_config
from tests.lab.cluster.addresses import (
    API_PORT,
    CONFIGURATION,
    CONTROL_PLANE,
    DNS_SERVICE,
    DOMAIN,
    ETCD_PEER_PORT,
    ETCD_PORT,
    KUBELET_PORT,
    PKI,
    PODS,
    SERVICES,
    STATE,
    kubeconfig,
)  # fmt: skip
from tests.lab.cluster.machine import InNode, Machine
from tests.lab.node import Daemon

ETCD_DATA = STATE / "etcd"
COREFILE = CONFIGURATION / "Corefile"
KUBELET_CONFIGURATION = CONFIGURATION / "kubelet.yaml"
CONTROLLERS_PORT, SCHEDULER_PORT, DNS_READY_PORT, PROXY_HEALTH_PORT = 10257, 10259, 8181, 10256
AGENT = "/opt/kybernate/bin/kybernate"
# A program that waits most of the time keeps little garbage, at the price of collecting it more often.
SMALL = ("env", "GOGC=50")
# The control plane needs no root. With an account of its own, it takes nothing from the 128 instances of inotify that
# the kernel lets root have, on which kubelets and containerd depend.
ACCOUNT = 64900
PLANE = ("setpriv", f"--reuid={ACCOUNT}", f"--regid={ACCOUNT}", "--clear-groups", *SMALL)


@dataclass(frozen=True)
class Served(Daemon):
    """A program that answers 200 at `path` of its port, by HTTPS."""

    path: str = "/healthz"

    def serves(self) -> bool:
        """Ask as the cluster's administrator."""
        (port,) = self.ports
        try:
            status, _ = ask(CONTROL_PLANE, port, "GET", self.path, "admin")
        except OSError:
            return False
        return status == http.HTTPStatus.OK


def ask(host: str, port: int, method: str, path: str, caller: str = "") -> tuple[int, str]:
    """Make a request by HTTPS and return its status and answer; `caller` has a certificate of that name."""
    context = ssl.create_default_context(cafile=PKI / "ca.crt")
    if caller:
        context.load_cert_chain(PKI / f"{caller}.crt", PKI / f"{caller}.key")
    connection = http.client.HTTPSConnection(host, port, context=context, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def give_to_plane(place: Path) -> None:
    """Make the control plane the owner of a file, or of a directory with all that it holds."""
    for path in (place, *place.rglob("*")):
        os.chown(path, ACCOUNT, ACCOUNT)


def etcd() -> Daemon:
    """Where the API server keeps its objects. They need not survive the machine: nothing is flushed to the disk."""
    ETCD_DATA.mkdir(mode=0o700, exist_ok=True)
    give_to_plane(ETCD_DATA)
    client, peer = f"http://127.0.0.1:{ETCD_PORT}", f"http://127.0.0.1:{ETCD_PEER_PORT}"
    return Daemon("etcd", (
        *PLANE, "etcd", "--name=lab", f"--data-dir={ETCD_DATA}", "--unsafe-no-fsync", "--log-level=warn",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=lab={peer}",
        "--heartbeat-interval=500", "--election-timeout=5000",
    ), (ETCD_PORT,))  # fmt: skip


def api_server() -> Daemon:
    """The API server; it waits for etcd by itself."""
    return Served("kube-apiserver", (
        *PLANE, "kube-apiserver", f"--advertise-address={CONTROL_PLANE}", f"--secure-port={API_PORT}",
        f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
        f"--client-ca-file={PKI}/ca.crt",
        f"--tls-cert-file={PKI}/apiserver.crt", f"--tls-private-key-file={PKI}/apiserver.key",
        f"--kubelet-client-certificate={PKI}/kubelet-client.crt",
        f"--kubelet-client-key={PKI}/kubelet-client.key",
        f"--kubelet-certificate-authority={PKI}/ca.crt", "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
        f"--service-account-key-file={PKI}/service-accounts.pub",
        f"--service-account-signing-key-file={PKI}/service-accounts.key",
        f"--requestheader-client-ca-file={PKI}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client", "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={PKI}/front-proxy-client.crt",
        f"--proxy-client-key-file={PKI}/front-proxy-client.key", "--enable-aggregator-routing",
        "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged",
        f"--service-cluster-ip-range={SERVICES}", "--profiling=false",
    ), (API_PORT,), path="/readyz")  # fmt: skip


def controllers() -> Daemon:
    """The controller manager."""
    return Daemon("kube-controller-manager", (
        *PLANE, "kube-controller-manager", *_as("controller-manager"), "--use-service-account-credentials",
        f"--service-account-private-key-file={PKI}/service-accounts.key", f"--root-ca-file={PKI}/ca.crt",
        f"--cluster-signing-cert-file={PKI}/ca.crt", f"--cluster-signing-key-file={PKI}/ca.key",
    ), (CONTROLLERS_PORT,))  # fmt: skip


def scheduler() -> Daemon:
    """The scheduler."""
    return Daemon("kube-scheduler", (*PLANE, "kube-scheduler", *_as("scheduler")), (SCHEDULER_PORT,))


def name_server() -> Daemon:
    """CoreDNS, where the control plane is; pods ask it by the Service kube-dns."""
    COREFILE.write_text(
        ".:53 {\n    errors\n    ready\n    cache 5\n"
        f"    kubernetes {DOMAIN} in-addr.arpa ip6.arpa {{\n"
        f"        kubeconfig {kubeconfig('coredns')}\n        pods insecure\n    }}\n}}\n"
    )
    return Daemon("coredns", (*PLANE, "coredns", "-conf", str(COREFILE)), (DNS_READY_PORT,))


def containerd(machine: Machine) -> Daemon:
    """A node's containerd, ready when its CRI plugin is, which opens its port of streams last."""
    ports, sockets = (containerd_config.STREAM_PORT,), (str(containerd_config.SOCKET),)
    return _in(machine, "containerd", ("/usr/bin/containerd",), ports, sockets)


def kubelet(machine: Machine) -> Daemon:
    """A node's kubelet."""
    files = (f"--config={KUBELET_CONFIGURATION}", f"--kubeconfig={kubeconfig('kubelet')}")
    argv = (*SMALL, "kubelet", *files, "--node-labels=kybernate.io/runtime=ready")  # as an administrator labels a node
    return _in(machine, "kubelet", argv, (KUBELET_PORT,))


def kubelet_configuration(address: str) -> str:
    """Return the kubelet's configuration file, as JSON, which is YAML as well."""
    return json.dumps({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "address": address, "port": KUBELET_PORT, "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False}, "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{PKI}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{PKI}/kubelet.crt", "tlsPrivateKeyFile": f"{PKI}/kubelet.key",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDNS": [DNS_SERVICE], "clusterDomain": DOMAIN, "resolvConf": "/etc/resolv.conf",
        "staticPodPath": f"{CONFIGURATION}/manifests",
        # The lab has no systemd, cgroup v1 where the machine has it, and may not lower OOM scores.
        "cgroupDriver": "cgroupfs", "failCgroupV1": False, "failSwapOn": False,
        "oomScoreAdj": 0,
        # The disk and the memory are the machine's: how full they are says nothing of the node.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%",
                         "nodefs.inodesFree": "1%"},
        "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False, "registryPullQPS": 0, "eventRecordQPS": 0, "volumeStatsAggPeriod": "5m",
    }, indent=2)  # fmt: skip


def proxy(machine: Machine) -> Daemon:
    """A node's kube-proxy. It leaves the machine's connection tracking as it is."""
    return _in(machine, "kube-proxy", (
        *SMALL, "kube-proxy", f"--kubeconfig={kubeconfig('kube-proxy')}", f"--hostname-override={machine.name}",
        "--proxy-mode=nftables", f"--cluster-cidr={PODS}", "--oom-score-adj=0", "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
    ), (PROXY_HEALTH_PORT,))  # fmt: skip


def agent(machine: Machine) -> Daemon:
    """A node's agent of this project."""
    return _in(machine, "agent", (AGENT, "agent"), sockets=("/run/kybernate/agent.sock",))


def _in(
    machine: Machine, name: str, argv: tuple[str, ...], ports: tuple[int, ...] = (), sockets: tuple[str, ...] = ()
) -> Daemon:
    """Return a program of a node, whose name and log have the node's name."""
    return InNode(f"{name}-{machine.name}", argv, ports, machine.into, machine, sockets)


def _as(name: str) -> tuple[str, ...]:
    """Return the flags of a component that there is once: how it calls the API server, also to know its own callers.

    It makes its serving certificate by itself, in memory: each file that it is given costs one of the machine's few
    inotify instances.
    """
    file = kubeconfig(name)
    callers = (f"--authentication-kubeconfig={file}", f"--authorization-kubeconfig={file}")
    return (f"--kubeconfig={file}", *callers, "--leader-elect=false", "--bind-address=127.0.0.1", "--profiling=false")
