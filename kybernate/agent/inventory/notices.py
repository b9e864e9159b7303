"""Which container an event of containerd's is about. Pure.

An event only says where to look again: what it claims may be over by then. Two things are taken from the event itself,
because no later look shows them: which task was deleted, and how an operation of a shim has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from kybernate_shim.messages import events_pb2, types_pb2

STARTED, ENDED = "/kybernate/shim/started", "/kybernate/shim/ended"
SKIPPED = "/kybernate/shim/skipped"
PROBE = "/kybernate/agent/subscribed"
TASKS = ("create", "start", "exit", "delete", "paused", "resumed", "oom", "checkpointed")
CONTAINERS = ("create", "update", "delete")
TOPICS = (
    *(f"/tasks/{name}" for name in TASKS),  # no execs: probes of Kubernetes make many of them
    *(f"/containers/{name}" for name in CONTAINERS),
    STARTED,
    ENDED,
    SKIPPED,
    PROBE,
)
FILTERS = tuple(f'topic=="{topic}"' for topic in TOPICS)


@dataclass(frozen=True)
class Notice:
    """`deleted_pid` is that of a task that was deleted; `labels` are those of our own topics."""

    namespace: str
    id: str
    topic: str
    deleted_pid: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


def notice_of(envelope: types_pb2.Envelope) -> Notice | None:
    """Return what an event is about; None for one of an exec, or one that cannot be read."""
    topic, payload = envelope.topic, envelope.event.value
    try:
        if topic == "/tasks/delete":
            deleted = events_pb2.TaskDelete.FromString(payload)
            whole = deleted.id in ("", deleted.container_id)
            return Notice(envelope.namespace, deleted.container_id, topic, deleted.pid) if whole else None
        if topic == "/tasks/exit":
            ended = events_pb2.TaskExit.FromString(payload)
            return Notice(envelope.namespace, ended.container_id, topic) if ended.id == ended.container_id else None
        if topic.startswith("/kybernate/"):
            update = events_pb2.ContainerUpdate.FromString(payload)
            return Notice(envelope.namespace, update.id, topic, labels=dict(update.labels))
        about = events_pb2.TaskOOM.FromString(payload)  # the id is the first field of all others
    except DecodeError:
        return None
    return Notice(envelope.namespace, about.container_id, topic) if about.container_id else None
