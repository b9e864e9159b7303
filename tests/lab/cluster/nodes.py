"""A cluster's node: its first process, containerd, kubelet, kube-proxy and this project's agent, and how it reboots."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.lab import cgroups, containerd_config
from tests.lab.cluster import components
from tests.lab.cluster.addresses import CONTROL_PLANE, SECONDS, STATE, node_address, pod_range
from tests.lab.cluster.cni import network
from tests.lab.cluster.machine import Machine
from tests.lab.init import ARCHIVES
from tests.lab.lanes import LANES
from tests.lab.namespaces import CHECKOUT
from tests.lab.node import REGISTRY_PORT, Daemon

MIRRORS = "/etc/containerd/certs.d"
PACKAGED = {2: "kybernate-1.7.toml", 3: "kybernate-2.toml"}  # by the version of containerd's configuration


@dataclass(frozen=True)
class Node:
    """Node `number` of the cluster of a lane."""

    lane: str
    number: int
    default_runtime: str = "runc"

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def address(self) -> str:
        return node_address(self.number)

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.number)

    @cached_property
    def containerd(self) -> Daemon:
        return components.containerd(self.machine)

    @cached_property
    def kubelet(self) -> Daemon:
        return components.kubelet(self.machine)

    @cached_property
    def proxy(self) -> Daemon:
        return components.proxy(self.machine)

    @cached_property
    def agent(self) -> Daemon:
        return components.agent(self.machine)

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        """All of its programs, in the order in which they start."""
        return (self.machine, self.containerd, self.kubelet, self.proxy, self.agent)

    def path(self, inside: str | Path) -> Path:
        """Return where a file of the node is for a process outside of it."""
        return Path(f"/proc/{self.machine.pid}/root", str(inside).lstrip("/"))

    def run(self, *argv: str | Path, check: bool = True, seconds: float = 120, **options: Any) -> str:
        """Run a command in the node and return what it prints. AssertionError where it fails, with all that it said."""
        words = [self.name, *map(str, argv)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False, **options)
        if check and done.returncode:
            raise AssertionError(f"{words} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def configure(self) -> None:
        """Write all of the node's configuration but its certificates, which are there before it starts."""
        lane = LANES[self.lane]
        runtimes = {"runc": containerd_config.RUNTIMES["runc"]}
        text = containerd_config.text(
            lane, log_level=os.environ.get("KYBERNATE_LAB_LOG_LEVEL", "info"), runtimes=runtimes,
            default=self.default_runtime, mirrors=MIRRORS,
        )  # fmt: skip
        packaged = (CHECKOUT / "packaging/containerd" / PACKAGED[lane.config_version]).read_text()
        registry = f'server = "http://{CONTROL_PLANE}:{REGISTRY_PORT}"\n'
        if lane.config_version == 2:  # no drop-in file, which would replace all of the plugin's settings
            text += packaged
        else:
            self._write("containerd/conf.d/kybernate.toml", packaged)
        self._write("containerd/config.toml", text)
        self._write(f"containerd/certs.d/localhost:{REGISTRY_PORT}/hosts.toml", registry)
        self._write("cni/net.d/10-lab.conflist", network(pod_range(self.number)))
        self._write("kubernetes/kubelet.yaml", components.kubelet_configuration(self.address))
        (STATE / self.name / "etc/kubernetes/manifests").mkdir()

    def _write(self, place: str, text: str) -> None:
        file = STATE / self.name / "etc" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def start_containerd(self) -> None:
        """Start the node's namespaces and its containerd, and wait until this serves."""
        self.machine.start()
        self.containerd.start()
        self.containerd.wait_ready(seconds=SECONDS)

    def import_images(self) -> None:
        """Import the lab's images for pods, the smallest first, without which no pod starts."""
        for archive in sorted(ARCHIVES.glob("*.tar"), key=lambda path: path.stat().st_size):
            self.run("ctr", "-n", "k8s.io", "images", "import", archive)

    def start_others(self) -> None:
        """Start what calls the API server, and the agent; the node is ready when the API server says so."""
        for daemon in (self.kubelet, self.proxy, self.agent):
            daemon.start()

    def stop(self) -> None:
        """Kill all that runs in the node, as a power failure does."""
        os.kill(self.machine.pid, signal.SIGKILL)
        cgroups.remove(self.name)  # thaws what is frozen, and waits until all of it has ended

    def reboot(self) -> None:
        """Stop the node and start it again: /run is empty then, and disks are as they were."""
        self.stop()
        self.start_containerd()
        self.start_others()
        for daemon in self.daemons:
            daemon.wait_ready(seconds=SECONDS)
