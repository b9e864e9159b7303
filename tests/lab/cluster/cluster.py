"""Brings a cluster up, and finds the one that runs.

cluster = running()
cluster.api_server.restart()
cluster.nodes[0].containerd.kill()
cluster.nodes[0].reboot()
"""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.lab import project
from tests.lab.cluster import components, identities, manifests
from tests.lab.cluster.addresses import ADMINISTRATOR, BRIDGE, CONFIGURATION, CONTROL_PLANE, SECONDS
from tests.lab.cluster.nodes import Node
from tests.lab.namespaces import CHECKOUT
from tests.lab.node import STATE, Daemon, NotReady, Registry

FACTS = STATE / "cluster.json"
LOWEST_PORT = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
REGISTRY_SETTINGS = Path("/etc/lab/registry.yml")


@dataclass(frozen=True)
class Cluster:
    """The control plane and the nodes of a lane's cluster. `default_runtime`: the handler of pods that name none."""

    lane: str
    size: int = 1
    default_runtime: str = "runc"

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(self.lane, number, self.default_runtime) for number in range(1, self.size + 1))

    @cached_property
    def etcd(self) -> Daemon:
        return components.etcd()

    @cached_property
    def api_server(self) -> Daemon:
        return components.api_server()

    @cached_property
    def controllers(self) -> Daemon:
        return components.controllers()

    @cached_property
    def scheduler(self) -> Daemon:
        return components.scheduler()

    @cached_property
    def name_server(self) -> Daemon:
        return components.name_server()

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        """All programs of the control plane and of the nodes."""
        plane = (self.etcd, self.api_server, self.controllers, self.scheduler, self.name_server)
        return (*plane, *(daemon for node in self.nodes for daemon in node.daemons))

    def node(self, name: str) -> Node:
        """Return the node of that name."""
        return next(node for node in self.nodes if node.name == name)

    def start(self) -> None:
        """Start everything and return when pods can run on every node. Raises NotReady with the reason."""
        _prepare_network()
        identities.write_all((node.name, node.address) for node in self.nodes)
        components.give_to_plane(CONFIGURATION)
        registry = Registry()
        for daemon in (registry, self.etcd, self.api_server):
            daemon.start()
        project.install_shim()
        with ThreadPoolExecutor() as pool:
            machines = [pool.submit(node.start_containerd) for node in self.nodes]
            self.api_server.wait_ready(seconds=SECONDS)
            for daemon in (self.controllers, self.scheduler, self.name_server):
                daemon.start()
            for node, machine in zip(self.nodes, machines, strict=True):
                machine.result()
                node.start_others()
            images = [pool.submit(node.import_images) for node in self.nodes]
            self._create_objects()
            self._wait_ready()
            for done in images:
                done.result()
        registry.wait_ready()
        FACTS.write_text(json.dumps({"lane": self.lane, "size": self.size, "default_runtime": self.default_runtime}))

    def _create_objects(self) -> None:
        for text in (manifests.runtime_class(CHECKOUT), manifests.all_objects()):
            kubectl("create", "--validate=false", "-f", "-", text=text)

    def _wait_ready(self) -> None:
        """Wait until the nodes are ready and both namespaces have what a pod needs of them."""
        names = [f"node/{node.name}" for node in self.nodes]
        waits = [("--for=create", name) for name in names]  # of several, kubectl would want the first look to find all
        waits += [("--for=condition=Ready", name) for name in names]
        for namespace in ("default", manifests.USER):
            waits += [("--for=create", f"--namespace={namespace}", "serviceaccount/default")]
            waits += [("--for=create", f"--namespace={namespace}", "configmap/kube-root-ca.crt")]
        for wait in waits:
            self._wait(*wait)
        for daemon in self.daemons:
            daemon.wait_ready(seconds=SECONDS)

    def _wait(self, *words: str) -> None:
        """Wait with `kubectl wait`, which watches. Raises NotReady, immediately where a program of the cluster ends."""
        argv = ["kubectl", f"--kubeconfig={ADMINISTRATOR}", "wait", f"--timeout={SECONDS}s", *words]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as waiting:
            while waiting.poll() is None:
                for daemon in self.daemons:
                    if not daemon.alive():
                        waiting.kill()
                        raise NotReady(f"{daemon.name} has ended\n{daemon.tail()}")
                time.sleep(0.05)
            if waiting.returncode:
                raise NotReady(f"{' '.join(argv)}: {waiting.stderr.read() if waiting.stderr else ''}")


def running() -> Cluster:
    """Return the cluster of this node of the lab."""
    return Cluster(**json.loads(FACTS.read_text()))


def kubectl(*argv: str, text: str = "") -> str:
    """Run kubectl as the administrator and return what it prints. Raises NotReady with what it says."""
    words = ["kubectl", f"--kubeconfig={ADMINISTRATOR}", *argv]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReady(f"{' '.join(words)} ended with {done.returncode}\n{done.stderr}")
    return done.stdout


def _prepare_network() -> None:
    """Make the network between the control plane and the nodes, which reach the image registry by it, too."""
    batch = [f"link add {BRIDGE} type bridge", f"address add {CONTROL_PLANE}/24 dev {BRIDGE}", f"link set {BRIDGE} up"]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(batch), text=True, check=True)
    LOWEST_PORT.write_text("53\n")  # of those that any user may serve: the name server's; the setting is this network's
    REGISTRY_SETTINGS.write_text(REGISTRY_SETTINGS.read_text().replace("127.0.0.1:", ":"))
