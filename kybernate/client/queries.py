"""What both clients read of the agent: the calls that begin no operation, each with its method, request and answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kybernate.client.requests import SERVICE, duration
from kybernate.messages import agent_pb2 as wire

Reply = TypeVar("Reply", bound=Message)
NO_CONTAINERS = "-"  # a namespace that no container has


@dataclass(frozen=True)
class Query(Generic[Reply]):
    """A call of "Service/Method"."""

    method: str
    request: Message
    reply: type[Reply]


def sent(query: Query[Reply]) -> tuple[str, Callable[[Message], bytes], Callable[[bytes], Reply]]:
    """Return what a gRPC channel needs: the method's path, and what writes the request and reads an answer."""
    return SERVICE + query.method, type(query.request).SerializeToString, query.reply.FromString


def node() -> Query[wire.Node]:
    return Query("Inventory/GetNode", wire.GetNodeRequest(), wire.Node)


def containers(namespace: str, *, all: bool) -> Query[wire.ListContainersResponse]:
    request = wire.ListContainersRequest(namespace=namespace, all=all)
    return Query("Inventory/ListContainers", request, wire.ListContainersResponse)


def revision() -> Query[wire.ListContainersResponse]:
    return containers(NO_CONTAINERS, all=False)


def container(name: str, namespace: str) -> Query[wire.Container]:
    return Query("Inventory/GetContainer", wire.GetContainerRequest(name=name, namespace=namespace), wire.Container)


def watch(kinds: Iterable[str], revision: int, instance: str) -> Query[wire.Change]:
    request = wire.WatchRequest(revision=revision, instance=instance, kinds=kinds)
    return Query("Inventory/Watch", request, wire.Change)


def read_log(name: str, namespace: str, lines: int, *, follow: bool) -> Query[wire.LogLines]:
    request = wire.ReadLogRequest(name=name, namespace=namespace, lines=lines, follow=follow)
    return Query("Inventory/ReadLog", request, wire.LogLines)


def report_activity(
    container: str, workload: str, namespace: str, in_flight: int, lasts: float
) -> Query[wire.ReportActivityResponse]:
    request = wire.ReportActivityRequest(namespace=namespace, in_flight=in_flight, lasts=duration(lasts))
    if workload:
        request.workload = workload
    else:
        request.container = container
    return Query("Activity/ReportActivity", request, wire.ReportActivityResponse)


def operation(id: str) -> Query[wire.Operation]:
    return Query("Operations/GetOperation", wire.GetOperationRequest(id=id), wire.Operation)


def operations(
    states: Iterable[wire.OperationState], container: str, limit: int, before: str
) -> Query[wire.ListOperationsResponse]:
    request = wire.ListOperationsRequest(states=states, container=container, limit=limit, before=before)
    return Query("Operations/ListOperations", request, wire.ListOperationsResponse)


def watch_operation(id: str) -> Query[wire.Operation]:
    return Query("Operations/WatchOperation", wire.GetOperationRequest(id=id), wire.Operation)


def cancel(id: str) -> Query[wire.Operation]:
    return Query("Operations/CancelOperation", wire.CancelOperationRequest(id=id), wire.Operation)


def images(request: wire.ListImagesRequest) -> Query[wire.ListImagesResponse]:
    return Query("Checkpoints/ListImages", request, wire.ListImagesResponse)


def image(name: str) -> Query[wire.Image]:
    return Query("Checkpoints/GetImage", wire.GetImageRequest(image=name), wire.Image)


def pin(image: str, *, pinned: bool) -> Query[wire.Image]:
    return Query("Checkpoints/PinImage", wire.PinImageRequest(image=image, pinned=pinned), wire.Image)


def label(image: str, labels: Mapping[str, str], removed: Iterable[str]) -> Query[wire.Image]:
    request = wire.LabelImageRequest(image=image, labels=labels, removed=removed)
    return Query("Checkpoints/LabelImage", request, wire.Image)
