"""The programs of a cluster with their flags, and how each shows that it serves."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass

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
from tests.lab.node import Daemon

COREFILE = CONFIGURATION / "Corefile"
KUBELET_CONFIGURATION = CONFIGURATION / "kubelet.yaml"
DNS_READY_PORT = 8181
AGENT = "/opt/kybernate/bin/kybernate"
# A program that waits most of the time keeps little garbage, at the price of collecting it more often.
SMALL = ("env", "GOGC=50")
# kubelet sets these to what it wants, or ends. They are the machine's, so that it is shown files with its values. Others
# must not be: a /proc that is covered in part lets no user namespace mount one of its own.
TUNABLES = {
    "kernel/keys/root_maxbytes": 25000000, "kernel/keys/root_maxkeys": 1000000, "kernel/panic": 10,
    "kernel/panic_on_oops": 1, "vm/overcommit_memory": 1, "vm/panic_on_oom": 0,
}  # fmt: skip
WITH_TUNABLES = """
mount --make-private /proc
for left in $(seq "$0"); do
    place=${1%=*} file=/run/tunables/${1%=*}
    mkdir -p "${file%/*}"
    echo "${1#*=}" >"$file"
    mount --bind "$file" "/proc/sys/$place"
    shift
done
exec "$@"
"""


@dataclass(frozen=True)
class Served(Daemon):
    """A program that answers 200 at `path` of its port, by HTTPS."""

    path: str = "/healthz"

    def serves(self) -> bool:
        """Ask as the cluster's administrator."""
        (port,) = self.ports
        context = ssl.create_default_context(cafile=PKI / "ca.crt")
        context.load_cert_chain(PKI / "admin.crt", PKI / "admin.key")
        connection = http.client.HTTPSConnection(CONTROL_PLANE, port, context=context, timeout=5)
        try:
            connection.request("GET", self.path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()


def etcd() -> Daemon:
    """Where the API server keeps its objects. They need not survive the machine: nothing is flushed to the disk."""
    client, peer = f"http://127.0.0.1:{ETCD_PORT}", f"http://127.0.0.1:{ETCD_PEER_PORT}"
    return Daemon("etcd", (
        *SMALL, "etcd", "--name=lab", f"--data-dir={STATE}/etcd", "--unsafe-no-fsync", "--log-level=warn",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=lab={peer}",
        "--heartbeat-interval=500", "--election-timeout=5000",
    ), (ETCD_PORT,))  # fmt: skip


def api_server() -> Daemon:
    """The API server; it waits for etcd by itself."""
    return Served("kube-apiserver", (
        *SMALL, "kube-apiserver", f"--advertise-address={CONTROL_PLANE}", f"--secure-port={API_PORT}",
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
    return Served("kube-controller-manager", (
        *SMALL, "kube-controller-manager", *_as("controller-manager"), "--leader-elect=false",
        f"--bind-address={CONTROL_PLANE}", "--use-service-account-credentials", "--profiling=false",
        f"--client-ca-file={PKI}/ca.crt", *_serving("controller-manager"),
        f"--service-account-private-key-file={PKI}/service-accounts.key", f"--root-ca-file={PKI}/ca.crt",
        f"--cluster-signing-cert-file={PKI}/ca.crt", f"--cluster-signing-key-file={PKI}/ca.key",
    ), (10257,))  # fmt: skip


def scheduler() -> Daemon:
    """The scheduler."""
    return Served("kube-scheduler", (
        *SMALL, "kube-scheduler", *_as("scheduler"), "--leader-elect=false", f"--bind-address={CONTROL_PLANE}",
        f"--client-ca-file={PKI}/ca.crt", *_serving("scheduler"), "--profiling=false",
    ), (10259,))  # fmt: skip


def name_server() -> Daemon:
    """CoreDNS, beside the control plane; pods ask it by the Service kube-dns."""
    COREFILE.write_text(
        ".:53 {\n    errors\n    ready\n    cache 5\n"
        f"    kubernetes {DOMAIN} in-addr.arpa ip6.arpa {{\n"
        f"        kubeconfig {kubeconfig('coredns')}\n        pods insecure\n    }}\n}}\n"
    )
    return Daemon("coredns", (*SMALL, "coredns", "-conf", str(COREFILE)), (DNS_READY_PORT,))


def kubelet(name: str, into: tuple[str, ...]) -> Daemon:
    """A node's kubelet, which finds files of its own in place of the machine's tunables."""
    values = [f"{place}={value}" for place, value in TUNABLES.items()]
    alone = ("unshare", "--mount", "--propagation=unchanged", "sh", "-ec", WITH_TUNABLES, str(len(values)), *values)
    argv = (*alone, *SMALL, "kubelet", f"--config={KUBELET_CONFIGURATION}", f"--kubeconfig={kubeconfig('kubelet')}")
    return Daemon(f"kubelet-{name}", argv, enter=into)


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
        "cgroupDriver": "cgroupfs", "failCgroupV1": False, "failSwapOn": False, "enforceNodeAllocatable": [],
        "oomScoreAdj": 0, "featureGates": {"KubeletInUserNamespace": True},
        # The disk and the memory are the machine's: how full they are says nothing of the node.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%",
                         "nodefs.inodesFree": "1%"},
        "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False, "registryPullQPS": 0, "eventRecordQPS": 0, "volumeStatsAggPeriod": "5m",
    }, indent=2)  # fmt: skip


def proxy(name: str, into: tuple[str, ...]) -> Daemon:
    """A node's kube-proxy. It leaves the machine's connection tracking as it is."""
    return Daemon(f"kube-proxy-{name}", (
        *SMALL, "kube-proxy", f"--kubeconfig={kubeconfig('kube-proxy')}", f"--hostname-override={name}",
        "--proxy-mode=nftables", f"--cluster-cidr={PODS}", "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
    ), enter=into)  # fmt: skip


def agent(name: str, into: tuple[str, ...]) -> Daemon:
    """A node's agent of this project."""
    return Daemon(f"agent-{name}", (AGENT, "agent"), enter=into)


def _as(name: str) -> tuple[str, ...]:
    """Return the flags by which a component calls the API server, also to know who calls it."""
    file = kubeconfig(name)
    return (f"--kubeconfig={file}", f"--authentication-kubeconfig={file}", f"--authorization-kubeconfig={file}")


def _serving(name: str) -> tuple[str, ...]:
    return (f"--tls-cert-file={PKI}/{name}.crt", f"--tls-private-key-file={PKI}/{name}.key")
