"""What containerd, a shim and the driver say of a container, as one message of the agent. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kybernate.agent.inventory.workload import OF_PODS, workload_of
from kybernate.agent.seats.claims import Claim, claim_of
from kybernate.messages import agent_pb2 as api
from kybernate.messages import containers_pb2
from kybernate.node.containerd import described
from kybernate.node.lookup import KnownContainer
from kybernate.node.restore import RESTORED_FROM
from kybernate.node.specs import VISIBLE_DEVICES, Spec, spec_of
from kybernate_shim.messages import process_pb2
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.oci.annotations import RESTORE_FROM, WAKE_ON_USE
from kybernate_shim.oci.spec import CDI_ANNOTATION, is_nvidia_cdi

HELD = "held"  # the shim's word
GPU_STATES: Mapping[str, api.Container.GpuState] = {  # by the shim's words
    "": api.Container.NO_GPU,
    "attached": api.Container.ATTACHED,
    "suspending": api.Container.SUSPENDING,
    "suspended": api.Container.SUSPENDED,
    "parking": api.Container.PARKING,
    "resuming": api.Container.RESUMING,
    "checkpointing": api.Container.CHECKPOINTING,
    "restoring": api.Container.RESTORING,
    "stuck": api.Container.STUCK,
}
NO_DEVICES = frozenset({"", "void", "none"})
INTERNAL = ("io.kubernetes.", "io.cri-containerd", "containerd.io/")  # begin the labels of containerd and the CRI
MOST_LABELS, LONGEST_LABEL = 64, 256
LONGEST_TEXT = 1024  # characters of a text in a message: image, annotations and labels are as long as a tenant likes
POLL_SECONDS, LONGEST_POLL_SECONDS = 1.0, 30.0


@dataclass(frozen=True)
class Known:
    """containerd's record of a container and its task, as far as it is kept."""

    container: KnownContainer
    workload: str = ""
    restored_from: str = ""
    has_gpu: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    claim: Claim = field(default_factory=Claim)
    wakes_on_use: bool = False  # its annotation says so


@dataclass(frozen=True)
class Reported:
    """What a container's shim has said: a status, or why there is none. `foreign`: it is another shim."""

    status: wire.Container | None = None
    problem: str = ""
    foreign: bool = False


def known(
    namespace: str,
    record: containers_pb2.Container,
    task: process_pb2.Process | None,
    pod_labels: Mapping[str, str],
    spec: Spec | None = None,
) -> Known:
    """Return what is kept of a record; `pod_labels` are those of its pod's sandbox, `spec` is as for `described`."""
    spec = spec_of(record) if spec is None else spec
    container = described(namespace, record, task, spec)
    annotations = _texts(spec.get("annotations"))
    own = (annotations.get(f"{RESTORE_FROM}.{container.name}") if container.name else "") or ""
    return Known(
        container,
        workload_of([record.labels, annotations, pod_labels], container.pod, pod_labels),
        "" if container.sandbox else own or annotations.get(RESTORE_FROM) or record.labels.get(RESTORED_FROM, ""),
        _has_gpu(spec),
        shown_labels(pod_labels if container.pod else record.labels),
        Claim() if container.sandbox else _claim_of(container, spec, record.labels),
        annotations.get(WAKE_ON_USE) == "true",
    )


def _claim_of(container: KnownContainer, spec: Spec, labels: Mapping[str, str]) -> Claim:
    of_up = bool(container.pod) and not container.in_kubernetes
    return claim_of(spec, labels, in_pod=container.in_kubernetes, of_up=of_up)


def shown_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that a message has: those of users, those first that name a workload."""
    own = sorted(
        (name for name in labels if not name.startswith(INTERNAL)), key=lambda name: (name not in OF_PODS, name)
    )
    return {name: labels[name][:LONGEST_LABEL] for name in own[:MOST_LABELS]}


def message_of(
    one: Known,
    reported: Reported,
    *,
    started_ns: int = 0,
    gpu_uuids: Iterable[str] = (),
    had_gpu: bool = False,
    pod_ip: str = "",
    in_flight: int = 0,
    active_until: float = 0.0,
    waits_for: str = "",
) -> api.Container:
    """Return the agent's message; `started_ns` is when the task's first process began, 0 where unknown.

    `had_gpu`: it had a GPU state before, whatever its spec says. A text has at most LONGEST_TEXT characters, so that a
    list of all containers fits into a message whatever their annotations are.
    """
    container, status = one.container, reported.status or wire.Container()
    gpu_uuids = sorted(gpu_uuids)
    message = api.Container(
        namespace=container.namespace,
        id=container.id,
        title=container.title[:LONGEST_TEXT],
        pod_namespace=container.pod_namespace[:LONGEST_TEXT],
        pod=container.pod[:LONGEST_TEXT],
        name=container.name[:LONGEST_TEXT],
        image=container.image[:LONGEST_TEXT],
        runtime=container.runtime[:LONGEST_TEXT],
        state=api.Container.HELD if status.state == HELD else container.state,  # containerd takes it for a running one
        pid=container.pid,
        gpu=_gpu_state(status.gpu, has_gpu=had_gpu or one.has_gpu or bool(gpu_uuids)),
        operation=status.operation or status.phase,  # one that no caller has named has its verb alone
        vram_bytes=status.vram_bytes,
        arena_bytes=status.arena.bytes,
        parked_bytes=status.parked_bytes,
        note=status.note[:LONGEST_TEXT],
        problem=reported.problem[:LONGEST_TEXT],
        sandbox=container.sandbox,
        workload=one.workload[:LONGEST_TEXT],
        gpu_uuids=gpu_uuids,
        restored_from=(
            status.restored_from.rpartition("/")[2] if status.HasField("restored_from") else one.restored_from
        )[:LONGEST_TEXT],
        foreign=reported.foreign,
        pod_uid=container.pod_uid[:LONGEST_TEXT],
        labels=one.labels,
        pod_ip=pod_ip,
        in_flight=in_flight,
        waits_for=waits_for[:LONGEST_TEXT],
    )
    if active_until:
        message.active_until.FromMilliseconds(round(active_until * 1000))
    if started_ns:
        message.started.FromNanoseconds(started_ns)
    return message


def _gpu_state(said: str, *, has_gpu: bool) -> api.Container.GpuState:
    """Return the value for the shim's word, OTHER for one that only a shim of another release says.

    A shim says "attached" of a container without a GPU, too.
    """
    if said == "attached" and not has_gpu:
        return api.Container.NO_GPU
    return GPU_STATES.get(said, api.Container.OTHER)


def poll_seconds(reported: Reported, failures: int) -> float | None:
    """Return in how many seconds a container is looked at again without an event; None: not at all.

    What runs an operation is looked at each second; what does not answer more and more rarely.
    """
    if reported.problem:
        return min(POLL_SECONDS * 2.0 ** min(failures, 10), LONGEST_POLL_SECONDS)
    runs = reported.status is not None and (reported.status.phase or reported.status.operation)
    return POLL_SECONDS if runs else None


def _has_gpu(spec: Mapping[str, Any]) -> bool:
    """Return whether an OCI spec asks for GPUs, by environment or a CDI device's annotation, or has their devices."""
    environment = _list(_mapping(spec.get("process")).get("env"))
    visible = [value[len(VISIBLE_DEVICES) :] for value in environment if str(value).startswith(VISIBLE_DEVICES)]
    devices = _list(_mapping(spec.get("linux")).get("devices"))
    paths = [str(_mapping(device).get("path", "")) for device in devices]
    asked = [text for name, text in _texts(spec.get("annotations")).items() if name.startswith(CDI_ANNOTATION)]
    return (
        any(value not in NO_DEVICES for value in visible)
        or any(path.startswith("/dev/nvidia") for path in paths)
        or any(is_nvidia_cdi(device) for text in asked for device in text.split(","))
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: Any) -> dict[str, str]:
    return {name: text for name, text in _mapping(value).items() if isinstance(text, str)}
