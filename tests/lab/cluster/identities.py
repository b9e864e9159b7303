"""Who takes part in a cluster: each program and each user with a certificate, where it looks for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.lab.cluster.addresses import (
    ADMINISTRATOR,
    API,
    CONFIGURATION,
    CONTROL_PLANE,
    DOMAIN,
    KUBERNETES_SERVICE,
    PKI,
    STATE,
    USER,
    kubeconfig,
)  # fmt: skip
from tests.lab.cluster.certificates import Authority, write_key_pair, write_kubeconfig
from tests.lab.cluster.manifests import USER as USER_NAME

API_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
             f"kubernetes.default.svc.{DOMAIN}", "127.0.0.1", CONTROL_PLANE, KUBERNETES_SERVICE)  # fmt: skip


def write_all(nodes: Iterable[tuple[str, str]]) -> None:
    """Write the identities of the control plane, of its users and of `nodes`, each with its name and address."""
    authority, front = Authority("kubernetes-ca"), Authority("front-proxy-ca")
    authority.pair.write(PKI / "ca")
    front.pair.write(PKI / "front-proxy-ca")
    front.client("front-proxy-client").write(PKI / "front-proxy-client")
    write_key_pair(PKI / "service-accounts")
    authority.server("kube-apiserver", API_NAMES).write(PKI / "apiserver")
    authority.client("kubelet-client").write(PKI / "kubelet-client")
    for name in ("controller-manager", "scheduler"):
        _client(authority, kubeconfig(name), f"system:kube-{name}")
    _client(authority, kubeconfig("coredns"), "coredns")
    administrator = authority.client("admin", "system:masters")
    administrator.write(PKI / "admin")
    write_kubeconfig(ADMINISTRATOR, API, authority.pair.certificate, administrator)
    user = authority.client(USER_NAME)
    user.write(PKI / "user")
    write_kubeconfig(USER, API, authority.pair.certificate, user, namespace=USER_NAME)
    for name, address in nodes:
        _node(authority, name, address)


def _node(authority: Authority, name: str, address: str) -> None:
    """Write what a node has: it knows the authority's certificate and not its key."""
    place = STATE / name / CONFIGURATION.relative_to("/")
    pki = place / "pki"
    authority.server(name, [address, name]).write(pki / "kubelet")
    shutil.copy(PKI / "ca.crt", pki)
    _client(authority, place / "kubelet.conf", f"system:node:{name}", "system:nodes")
    _client(authority, place / "kube-proxy.conf", "system:kube-proxy")


def _client(authority: Authority, path: Path, name: str, *groups: str) -> None:
    write_kubeconfig(path, API, authority.pair.certificate, authority.client(name, *groups))
