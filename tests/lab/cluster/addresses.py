"""Addresses, files and deadlines of a cluster, which its programs and its tests share."""

from __future__ import annotations

from pathlib import Path

SECONDS = 120  # in which each step of a start must have ended, on a busy machine
DOMAIN = "cluster.local"
BRIDGE = "lab0"  # between the control plane and the nodes
CONTROL_PLANE = "172.31.0.1"
API_PORT, ETCD_PORT, ETCD_PEER_PORT, KUBELET_PORT = 6443, 2379, 2380, 10250
API = f"https://{CONTROL_PLANE}:{API_PORT}"
PODS = "10.88.0.0/16"
SERVICES = "10.96.0.0/16"
KUBERNETES_SERVICE, DNS_SERVICE = "10.96.0.1", "10.96.0.10"

CONFIGURATION = Path("/etc/kubernetes")
PKI = CONFIGURATION / "pki"
ADMINISTRATOR = CONFIGURATION / "admin.conf"
USER = CONFIGURATION / "user.conf"
STATE = Path("/var/lib/lab")  # the parts of each node that outlive its reboot, and etcd's data
CONTAINERD_STATE = Path("/var/lib/containerd")  # in memory


def node_address(number: int) -> str:
    """Return the address of node `number`, which counts from 1."""
    return f"172.31.0.{10 + number}"


def pod_range(number: int) -> str:
    """Return the range from which the pods of node `number` have their addresses."""
    return f"10.88.{number}.0/24"


def kubeconfig(name: str) -> Path:
    """Return the file by which a program of the cluster calls the API server."""
    return CONFIGURATION / f"{name}.conf"
