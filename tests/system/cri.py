"""Pods as the kubelet makes them: containerd's CRI over gRPC, one method a step."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
import websocket

from kybernate.messages import cri_config_pb2 as config
from kybernate.messages import cri_images_pb2 as image_messages
from kybernate.messages import cri_images_pb2_grpc as images
from kybernate.messages import cri_runtime_pb2 as wire
from kybernate.messages.cri_runtime_pb2_grpc import RuntimeServiceStub
from tests.system import identity
from tests.system.ctr import BUSYBOX, containerd_version, eventually

SOCKET = "unix:///run/containerd/containerd.sock"
CALL_SECONDS = 120
_numbers = itertools.count(1)


@dataclass
class Pod:
    """A sandbox, and the configuration that containers of it repeat."""

    id: str
    config: config.PodSandboxConfig

    @property
    def logs(self) -> Path:
        return Path(self.config.log_directory)


def _labels(pod: config.PodSandboxConfig) -> dict[str, str]:
    """Return the labels by which the kubelet, and everybody else, finds the parts of a pod."""
    return {
        "io.kubernetes.pod.name": pod.metadata.name,
        "io.kubernetes.pod.namespace": pod.metadata.namespace,
        "io.kubernetes.pod.uid": pod.metadata.uid,
    }


@dataclass
class Cri:
    """The kubelet's side of CRI for pods under one runtime handler."""

    handler: str = "kybernate"
    logs: Path = Path("/var/log/pods")
    service: Any = field(init=False)

    def __post_init__(self) -> None:
        self._channel = grpc.insecure_channel(SOCKET)
        self.service = RuntimeServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def call(self, method: str, request: Any, *, seconds: float = CALL_SECONDS) -> Any:
        return getattr(self.service, method)(request, timeout=seconds, wait_for_ready=True)

    def pull(self, image: str) -> None:
        """Pull from a registry, so that the image has a digest there."""
        images.ImageServiceStub(self._channel).PullImage(
            image_messages.PullImageRequest(image=config.ImageSpec(image=image)), timeout=CALL_SECONDS
        )

    # -- pods

    def run_pod(
        self,
        *,
        namespace: str = "default",
        host_network: bool = False,
        annotations: Mapping[str, str] = {},
        hostname: str = "",
        privileged: bool = False,
        users: int | None = None,
    ) -> Pod:
        """Run a sandbox; `users` is the node's id of root in a user namespace of the pod's own (`hostUsers: false`)."""
        name = f"pod{os.getpid()}-{next(_numbers)}"
        pod = config.PodSandboxConfig(hostname=hostname or name, log_directory=str(self.logs / name))
        pod.metadata.name, pod.metadata.uid, pod.metadata.namespace = name, f"uid-{name}", namespace
        pod.annotations.update(annotations)
        pod.labels.update(_labels(pod))
        pod.linux.security_context.namespace_options.pid = config.CONTAINER  # the kubelet's default
        pod.linux.security_context.privileged = privileged
        if host_network:
            pod.linux.security_context.namespace_options.network = config.NODE
            pod.hostname = ""
        if users is not None:
            options = pod.linux.security_context.namespace_options.userns_options
            options.mode = config.POD
            for ids in (options.uids, options.gids):
                ids.add(host_id=users, container_id=0, length=65536)
        Path(pod.log_directory).mkdir(parents=True, exist_ok=True)
        request = wire.RunPodSandboxRequest(config=pod, runtime_handler=self.handler)
        return Pod(self.call("RunPodSandbox", request).pod_sandbox_id, pod)

    def remove_pod(self, pod: Pod) -> None:
        self.call("StopPodSandbox", wire.StopPodSandboxRequest(pod_sandbox_id=pod.id))
        self.call("RemovePodSandbox", wire.RemovePodSandboxRequest(pod_sandbox_id=pod.id))
        shutil.rmtree(pod.logs, ignore_errors=True)

    @contextmanager
    def pod(self, **options: Any) -> Iterator[Pod]:
        pod = self.run_pod(**options)
        try:
            yield pod
        finally:
            self.remove_pod(pod)

    def pod_ip(self, pod: Pod) -> str:
        answer = self.call("PodSandboxStatus", wire.PodSandboxStatusRequest(pod_sandbox_id=pod.id))
        return str(answer.status.network.ip)

    # -- containers

    def create(
        self,
        pod: Pod,
        name: str,
        command: Sequence[str] = (),
        *,
        image: str = BUSYBOX,
        annotations: Mapping[str, str] = {},
        env: Mapping[str, str] = {},
        mounts: Sequence[config.Mount] = (),
        devices: Sequence[str] = (),
        memory: int = 0,
        stdin: bool = False,
        tty: bool = False,
        attempt: int = 0,
        run_as: int | None = None,
        privileged: bool = False,
        add: Sequence[str] = (),
        drop: Sequence[str] = (),
        no_new_privs: bool = False,
        seccomp: str = "",
    ) -> str:
        """Create a container.

        `devices` are CDI's, `add` and `drop` capabilities, and `seccomp` is a ProfileType by its name.
        """
        container = config.ContainerConfig(
            command=command, log_path=f"{name}.{attempt}.log", stdin=stdin, tty=tty, mounts=mounts
        )
        container.metadata.name, container.metadata.attempt = name, attempt
        container.image.image = image
        container.CDI_devices.extend(config.CDIDevice(name=name) for name in devices)
        container.annotations.update(annotations)
        container.labels.update({**_labels(pod.config), "io.kubernetes.container.name": name})
        for key, value in env.items():
            container.envs.add(key=key, value=value)
        container.linux.security_context.namespace_options.CopyFrom(pod.config.linux.security_context.namespace_options)
        security = container.linux.security_context
        if run_as is None and not privileged and (run_as := identity.user()) is not None:
            drop = drop or ["ALL"]
        if run_as is not None:
            security.run_as_user.value = security.run_as_group.value = run_as
        security.privileged, security.no_new_privs = privileged, no_new_privs
        security.capabilities.add_capabilities.extend(add)
        security.capabilities.drop_capabilities.extend(drop)
        if seccomp:
            security.seccomp.profile_type = config.SecurityProfile.ProfileType.Value(seccomp)
        container.linux.resources.memory_limit_in_bytes = memory
        request = wire.CreateContainerRequest(pod_sandbox_id=pod.id, config=container, sandbox_config=pod.config)
        return str(self.call("CreateContainer", request).container_id)

    def start(self, id: str) -> None:
        self.call("StartContainer", wire.StartContainerRequest(container_id=id))

    def run(self, pod: Pod, name: str, command: Sequence[str], **options: Any) -> str:
        id = self.create(pod, name, command, **options)
        self.start(id)
        return id

    def stop(self, id: str, *, grace: int = 0) -> None:
        self.call("StopContainer", wire.StopContainerRequest(container_id=id, timeout=grace))

    def remove(self, id: str) -> None:
        self.call("RemoveContainer", wire.RemoveContainerRequest(container_id=id))

    def status(self, id: str) -> Any:
        return self.call("ContainerStatus", wire.ContainerStatusRequest(container_id=id)).status

    def state(self, id: str) -> str:
        """Return the state by the name that CRI gives it, as CONTAINER_RUNNING."""
        return str(wire.ContainerState.Name(self.status(id).state))

    def exec(self, id: str, *command: str, seconds: int = 30) -> tuple[int, str]:
        answer = self.call("ExecSync", wire.ExecSyncRequest(container_id=id, cmd=command, timeout=seconds))
        return answer.exit_code, answer.stdout.decode()

    def attach(self, id: str, *, stdin: bool = False) -> websocket.WebSocket:
        """Attach as `kubectl attach` does, over the streaming server; frames begin with the stream's number."""
        url = self.call("Attach", wire.AttachRequest(container_id=id, stdin=stdin, stdout=True, stderr=True)).url
        return websocket.create_connection(
            url.replace("http", "ws", 1), subprotocols=["v4.channel.k8s.io"], timeout=20, suppress_origin=True
        )

    def stats(self, id: str) -> Any:
        return self.call("ContainerStats", wire.ContainerStatsRequest(container_id=id)).stats

    def checkpoint(self, id: str, archive: Path) -> bool:
        """Write the container's checkpoint as an archive; return False where CRI has no checkpoints, and refuses it."""
        request = wire.CheckpointContainerRequest(container_id=id, location=str(archive), timeout=60)
        if containerd_version() >= (2, 0):
            self.call("CheckpointContainer", request)
            return True
        with pytest.raises(grpc.RpcError, match=r"(?i)unimplemented|not implemented"):
            self.call("CheckpointContainer", request)
        return False

    def log(self, pod: Pod, name: str, attempt: int = 0) -> list[str]:
        """Return the lines of a container's log, without time and stream."""
        path = pod.logs / f"{name}.{attempt}.log"
        if not path.exists():
            return []
        return [line.split(" ", 3)[3] for line in path.read_text().splitlines() if line.count(" ") >= 3]

    def await_log(self, pod: Pod, name: str, text: str, *, attempt: int = 0, seconds: float = 20) -> list[str]:
        def logged() -> list[str]:
            lines = self.log(pod, name, attempt)
            assert text in lines, f"{text!r} is not in {lines[-20:]}"
            return lines

        return eventually(logged, seconds=seconds)
