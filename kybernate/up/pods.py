"""The pods of `kybernate up`, by containerd's CRI: one for each model, in the host's network, known by its labels."""

from __future__ import annotations

import io
import json
import platform
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

import grpc

from kybernate.messages import containers_pb2 as records
from kybernate.messages import cri_config_pb2 as config
from kybernate.messages import cri_images_pb2 as image_messages
from kybernate.messages import cri_runtime_pb2 as wire
from kybernate.messages.containers_pb2_grpc import ContainersStub
from kybernate.messages.content_pb2 import ListStatusesRequest
from kybernate.messages.content_pb2_grpc import ContentStub
from kybernate.messages.cri_images_pb2_grpc import ImageServiceStub
from kybernate.messages.cri_runtime_pb2_grpc import RuntimeServiceStub
from kybernate.node.failure import Missing, Refused, Unavailable
from kybernate.node.lookup import UP_PODS
from kybernate.up.control import LOGS
from kybernate.up.models_file import Entry
from kybernate_shim.oci.annotations import PRIORITY, RESTORE_FROM, SEAT

PROJECT: Final = "kybernate.io/up"
MODEL: Final = "kybernate.io/up-model"
DIGEST: Final = "kybernate.io/up-digest"
NETWORK: Final = "kybernate.io/up-network"
ARENA: Final = "kybernate.io/arena"
HANDLER: Final = "kybernate"
CALL_SECONDS: Final = 120.0
PULL_SECONDS: Final = 3600.0
LOG_BYTES: Final = 16 << 20  # of a model's log, until it is rotated
NAMESPACE: Final = (("containerd-namespace", "k8s.io"),)  # of the CRI's containers, in a call's metadata
LOOK_SECONDS: Final = 0.5  # between two looks at what has arrived
STOP_SECONDS: Final = 10
STARTING_SECONDS: Final = 20.0  # for which a container is waited for that is to be removed
IS_STARTING: Final = "is in starting state"  # containerd's words
NANOSECONDS: Final = 1e9
# The image of a command without one: nothing. What the command sees of the host is mounted into it, read-only.
EMPTY: Final = "kybernate.io/up/empty:1"
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}  # as images name them
HOST: Final = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/sbin", "/usr")


@dataclass(frozen=True)
class Running:
    """A model's pod, and its container where it has one. Times are in seconds since 1970, 0 where there is none."""

    model: str
    digest: str
    pod: str
    container: str = ""
    running: bool = False
    started: float = 0.0
    ended: float = 0.0
    exit_code: int = 0
    reason: str = ""
    address: str = "127.0.0.1"


class Pods:
    """A project's pods."""

    def __init__(self, project: str, address: str = "unix:///run/containerd/containerd.sock") -> None:
        self._project = project
        self._channel = grpc.insecure_channel(address, options=[("grpc.default_authority", "localhost")])
        self._runtime: Any = RuntimeServiceStub(self._channel)
        self._images: Any = ImageServiceStub(self._channel)
        self._addresses: dict[str, str] = {}  # of pods that run, by their ids
        self._content: Any = ContentStub(self._channel)
        self._records: Any = ContainersStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def logs(self) -> Path:
        return LOGS / self._project

    # -- images

    def has_image(self, entry: Entry) -> bool:
        """Return whether a model's image is on the node."""
        request = image_messages.ImageStatusRequest(image=config.ImageSpec(image=entry.image or EMPTY))
        return bool(self._call(self._images.ImageStatus, request).HasField("image"))

    def pull(self, entry: Entry, count: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Get a model's image; that of a command without one is made. Raises Refused and Unavailable.

        `count` gets the bytes that have arrived of those that are known to come, as often as they are looked at.
        """
        if entry.image:
            request = image_messages.PullImageRequest(image=config.ImageSpec(image=entry.image))
            with _translated():
                pulled = self._images.PullImage.future(request, timeout=PULL_SECONDS)
                while not pulled.done():
                    count(*self._arrived())
                    with suppress(grpc.FutureTimeoutError):
                        pulled.result(LOOK_SECONDS)
                pulled.result()
            return
        imported = ["ctr", "--namespace", "k8s.io", "images", "import", "-"]
        try:
            subprocess.run(imported, input=_empty_image(), check=True, capture_output=True, timeout=CALL_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", b"") or str(error).encode()
            raise Refused(f"the empty image was not imported: {said.decode(errors='replace').strip()}") from error

    def _arrived(self) -> tuple[int, int]:
        """Return the bytes that are there of what containerd fetches for pods now, and of how many."""
        try:
            found = self._content.ListStatuses(ListStatusesRequest(), timeout=CALL_SECONDS, metadata=NAMESPACE).statuses
        except grpc.RpcError:
            return 0, 0  # the pull itself says what is wrong
        return sum(one.offset for one in found), sum(one.total for one in found)

    # -- pods

    def list(self) -> dict[str, Running]:
        """Return the project's pods by their models; of two of one model, the newer."""
        labels = {PROJECT: self._project}
        pods = wire.ListPodSandboxRequest(filter=wire.PodSandboxFilter(label_selector=labels))
        containers = wire.ListContainersRequest(filter=wire.ContainerFilter(label_selector=labels))
        by_pod = {one.pod_sandbox_id: one for one in self._call(self._runtime.ListContainers, containers).containers}
        found: dict[str, Running] = {}
        for pod in sorted(self._call(self._runtime.ListPodSandbox, pods).items, key=lambda one: one.created_at):
            model = pod.labels.get(MODEL, "")
            if (older := found.get(model)) is not None:
                self.remove(older)
            found[model] = self._running(pod, by_pod.get(pod.id))
        return found

    def _running(self, pod: Any, container: Any) -> Running:
        model, digest = pod.labels.get(MODEL, ""), pod.labels.get(DIGEST, "")
        if container is None:
            return Running(model, digest, pod.id)
        request = wire.ContainerStatusRequest(container_id=container.id)
        try:
            status, address = self._call(self._runtime.ContainerStatus, request).status, self._address_of(pod)
        except Missing:  # removed since it was listed
            return Running(model, digest, pod.id)
        return Running(
            model,
            digest,
            pod.id,
            container.id,
            status.state == wire.CONTAINER_RUNNING and pod.state == wire.SANDBOX_READY,
            status.started_at / NANOSECONDS,
            status.finished_at / NANOSECONDS,
            status.exit_code,
            status.message or status.reason,
            address,
        )

    def _address_of(self, pod: Any) -> str:
        """Return where a pod's programs listen: its address, the loopback where it has the host's network."""
        if pod.labels.get(NETWORK, "host") == "host":
            return Running.address
        if pod.id not in self._addresses:
            request = wire.PodSandboxStatusRequest(pod_sandbox_id=pod.id)
            self._addresses[pod.id] = self._call(self._runtime.PodSandboxStatus, request).status.network.ip
        return self._addresses[pod.id]

    def has_network(self) -> bool:
        """Return whether containerd can give pods a network of their own."""
        conditions = self._call(self._runtime.Status, wire.StatusRequest()).status.conditions
        return any(one.type == "NetworkReady" and one.status for one in conditions)

    def rotate(self, running: Running) -> None:
        """Give a model's log another file where it has grown, as kubelet does; one older file is kept."""
        path = self.logs / running.model / "0.log"
        try:
            if not running.running or path.stat().st_size < LOG_BYTES:
                return
            path.rename(path.with_name("0.log.old"))
        except OSError:
            return  # it has written nothing, or its log is no file
        self._call(self._runtime.ReopenContainerLog, wire.ReopenContainerLogRequest(container_id=running.container))

    def prioritize(self, running: Running, priority: int) -> None:
        """Have a container with a seat count for the arbiter with another priority, while it runs.

        Raises Missing, Refused and Unavailable.
        """
        record = records.Container(id=running.container, labels={PRIORITY: str(priority)})
        request = records.UpdateContainerRequest(container=record)
        request.update_mask.paths.append(f"labels.{PRIORITY}")
        self._call(self._records.Update, request, metadata=NAMESPACE)

    def start(self, entry: Entry, template: str = "") -> None:
        """Start a model's program, from a template where one is named.

        Raises Refused and Unavailable, with nothing left of it.
        """
        pod = self._pod(entry)
        Path(pod.log_directory).mkdir(parents=True, exist_ok=True)
        run = wire.RunPodSandboxRequest(config=pod, runtime_handler=HANDLER)
        id = self._call(self._runtime.RunPodSandbox, run).pod_sandbox_id
        try:
            container = self._container(entry, pod, template)
            create = wire.CreateContainerRequest(pod_sandbox_id=id, config=container, sandbox_config=pod)
            created = self._call(self._runtime.CreateContainer, create).container_id
            self._call(self._runtime.StartContainer, wire.StartContainerRequest(container_id=created))
        except BaseException:
            self._remove(id)
            raise

    def remove(self, running: Running) -> None:
        """Stop and remove a pod. Raises Refused and Unavailable."""
        if running.container and running.running:
            stop = wire.StopContainerRequest(container_id=running.container, timeout=STOP_SECONDS)
            with suppress(Missing):
                self._call(self._runtime.StopContainer, stop)
        self._remove(running.pod)

    def _remove(self, pod: str) -> None:
        """Remove a pod; a container that containerd still starts, as for a client that was killed, is waited for."""
        end = time.monotonic() + STARTING_SECONDS
        while True:
            self._call(self._runtime.StopPodSandbox, wire.StopPodSandboxRequest(pod_sandbox_id=pod))
            try:
                self._call(self._runtime.RemovePodSandbox, wire.RemovePodSandboxRequest(pod_sandbox_id=pod))
            except Refused as error:
                if IS_STARTING not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(LOOK_SECONDS)
            else:
                return

    # -- what they are made of

    def _pod(self, entry: Entry) -> config.PodSandboxConfig:
        pod = config.PodSandboxConfig(log_directory=str(self.logs / entry.name))
        pod.metadata.name, pod.metadata.namespace = entry.name, self._project
        pod.metadata.uid = f"{UP_PODS}{self._project}-{entry.name}-{entry.digest}"
        pod.labels.update(self._labels(entry))
        if entry.seat:
            pod.annotations[SEAT] = entry.seat
        options = pod.linux.security_context.namespace_options
        options.network, options.pid = config.NODE if entry.network == "host" else config.POD, config.CONTAINER
        if entry.network != "host":
            pod.hostname = entry.name
        return pod

    def _labels(self, entry: Entry) -> Mapping[str, str]:
        return {
            PROJECT: self._project,
            MODEL: entry.name,
            DIGEST: entry.digest,
            NETWORK: entry.network,
            "io.kubernetes.pod.name": entry.name,
            "io.kubernetes.pod.namespace": self._project,
            "io.kubernetes.pod.uid": f"{UP_PODS}{self._project}-{entry.name}-{entry.digest}",
            "io.kubernetes.container.name": entry.name,
        }

    def _container(self, entry: Entry, pod: config.PodSandboxConfig, template: str) -> config.ContainerConfig:
        container = config.ContainerConfig(log_path="0.log")
        container.metadata.name = entry.name
        container.image.image = entry.image or EMPTY
        container.labels.update(self._labels(entry))
        if entry.seat:
            container.labels[PRIORITY] = str(entry.priority)  # no image's label has a say
        if entry.image:
            container.args.extend(entry.command)
        else:
            container.command.extend(entry.command)
        for name, value in entry.environment.items():
            container.envs.add(key=name, value=value)
        container.CDI_devices.extend(config.CDIDevice(name=name) for name in entry.devices)
        for mount in entry.mounts:
            container.mounts.add(container_path=mount.target, host_path=mount.source, readonly=not mount.writable)
        if not entry.image:
            for place in HOST:
                if Path(place).exists() and place not in {mount.target for mount in entry.mounts}:
                    container.mounts.add(container_path=place, host_path=str(Path(place).resolve()), readonly=True)
        if entry.seat:
            container.annotations[SEAT], container.annotations[PRIORITY] = entry.seat, str(entry.priority)
        if entry.devices:
            container.annotations[ARENA] = "true" if entry.arena else "false"  # where the node has one
        if template:
            container.annotations[RESTORE_FROM] = template
        security = container.linux.security_context
        security.namespace_options.CopyFrom(pod.linux.security_context.namespace_options)
        security.no_new_privs = True
        if entry.user is not None:
            security.run_as_user.value = security.run_as_group.value = entry.user
        return container

    def _call(self, method: Any, request: Any, metadata: Sequence[tuple[str, str]] = ()) -> Any:
        with _translated():
            return method(request, timeout=CALL_SECONDS, metadata=metadata)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            raise Unavailable(
                "containerd does not answer", advice="`kybernate doctor` examines it; `kybernate up` tries again"
            ) from error
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise Refused(
                f"containerd's CRI is off: {error.details()}",
                state="models need it, and none is started",
                advice="take `cri` out of `disabled_plugins` in /etc/containerd/config.toml, and restart containerd",
            ) from error
        if code is grpc.StatusCode.NOT_FOUND:
            raise Missing(f"containerd: {error.details()}") from error
        raise Refused(f"containerd: {error.details()}") from error


def _empty_image() -> bytes:
    """Return an OCI archive of an image without files, which is the same each time."""
    layer = _tar({})
    shape = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    settings = json.dumps(shape).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _described("application/vnd.oci.image.config.v1+json", settings),
            "layers": [_described("application/vnd.oci.image.layer.v1.tar", layer)],
        }
    ).encode()
    named = {**_described("application/vnd.oci.image.manifest.v1+json", manifest)}
    named["annotations"] = {"io.containerd.image.name": EMPTY}
    index = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
    blobs = {f"blobs/sha256/{sha256(one).hexdigest()}": one for one in (layer, settings, manifest)}
    return _tar({"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": index, **blobs})


def _described(kind: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{sha256(content).hexdigest()}"


def _tar(files: Mapping[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()
