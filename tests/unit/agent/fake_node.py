"""A node for the inventory: containerd and shims in memory, whose events are lost with a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from google.protobuf.message import Message

from kybernate.agent.inventory.notices import ENDED, STARTED
from kybernate.agent.inventory.state import Reported
from kybernate.messages import containers_pb2
from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable, RecordTooLarge
from kybernate.node.lookup import KnownContainer
from kybernate_shim.messages import events_pb2, process_pb2, types_pb2
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.messages.any import OCI_SPEC, pack, pack_json

NAMESPACE = "default"


class FakeNode:
    """`records`, `tasks` and `statuses` by id are the truth; changing methods publish as containerd and shims do."""

    address = "/fake"

    def __init__(self) -> None:
        self.up = True
        self.unanswered = 0  # so many reads of a record fail, as of a containerd that is being ended
        self.records: dict[str, containers_pb2.Container] = {}
        self.task_of: dict[str, process_pb2.Process] = {}
        self.statuses: dict[str, wire.Container] = {}
        self.silent: set[str] = set()
        self.too_large: set[str] = set()  # containers whose records are larger than a message
        self.asked: list[str] = []
        self.looked: list[str] = []
        self.lingering: dict[str, list[process_pb2.Process]] = {}  # deleted, and still listed for some looks
        self._streams: list[asyncio.Queue[types_pb2.Envelope | None]] = []
        self._pid = 100

    # -- what happens -----------------------------------------------------------------------------------------------

    def create(self, id: str, *, gpu: bool = False, runtime: str = "io.containerd.kybernate.v1", **labels: str) -> None:
        spec = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"] if gpu else []}}
        record = containers_pb2.Container(id=id, image="busybox", labels=labels, spec=pack_json(OCI_SPEC, spec))
        record.runtime.name = runtime
        self.records[id] = record
        self.publish("/containers/create", events_pb2.ContainerUpdate(id=id))

    def annotate(self, id: str, **annotations: str) -> None:
        spec = json.loads(self.records[id].spec.value) | {"annotations": annotations}
        self.records[id].spec.CopyFrom(pack_json(OCI_SPEC, spec))

    def start(self, id: str) -> None:
        self._pid += 1
        self.task_of[id] = process_pb2.Process(id=id, pid=self._pid, status="RUNNING")
        self.statuses[id] = wire.Container(id=id, state="running", gpu="attached")
        self.publish("/tasks/start", events_pb2.TaskStart(container_id=id, pid=self._pid))

    def turn(self, id: str, status: str, topic: str) -> None:
        self.task_of[id].status = process_pb2.Status.Value(status)  # type: ignore[assignment]
        self.publish(topic, events_pb2.TaskPaused(container_id=id))

    def exit(self, id: str) -> None:
        task = self.task_of[id]
        task.status = process_pb2.STOPPED
        self.publish("/tasks/exit", events_pb2.TaskExit(container_id=id, id=id, pid=task.pid))

    def delete_task(self, id: str, *, lingers: bool = False) -> None:
        task = self.task_of.pop(id)
        self.statuses.pop(id, None)
        if lingers and self.up:
            self.lingering[id] = [task] * 3
        self.publish("/tasks/delete", events_pb2.TaskDelete(container_id=id, pid=task.pid))

    def delete(self, id: str) -> None:
        del self.records[id]
        self.lingering.pop(id, None)
        self.publish("/containers/delete", events_pb2.ContainerUpdate(id=id))

    def begin(self, id: str, verb: str) -> None:
        self.statuses[id].phase = verb
        self.publish(STARTED, events_pb2.ContainerUpdate(id=id, labels={"verb": verb}))

    def end(self, id: str, verb: str, outcome: str = "done", **status: Any) -> None:
        self.statuses[id].MergeFrom(wire.Container(**status))
        self.statuses[id].phase = ""
        self.publish(ENDED, events_pb2.ContainerUpdate(id=id, labels={"verb": verb, "outcome": outcome}))

    def publish(self, topic: str, event: Message) -> None:
        envelope = types_pb2.Envelope(namespace=NAMESPACE, topic=topic, event=pack(event))
        for stream in self._streams:
            stream.put_nowait(envelope)

    def fall(self) -> None:
        """containerd dies: its streams end, and what happens now is reported to no one."""
        self.up = False
        self.lingering.clear()  # one that starts again lists what there is
        for stream in self._streams:
            stream.put_nowait(None)
        self._streams = []

    # -- containerd's API -------------------------------------------------------------------------------------------

    def _require_up(self) -> None:
        if not self.up:
            raise ContainerdUnreachable("containerd does not answer")

    async def events(self, filters: Sequence[str]) -> AsyncGenerator[types_pb2.Envelope, None]:
        await asyncio.sleep(0)  # a subscription does not stand immediately
        self._require_up()
        stream: asyncio.Queue[types_pb2.Envelope | None] = asyncio.Queue()
        self._streams.append(stream)
        while (envelope := await stream.get()) is not None:
            if f'topic=="{envelope.topic}"' in filters:
                yield envelope
        raise ContainerdUnreachable("the stream has ended")

    async def forward(self, envelope: types_pb2.Envelope) -> None:
        self._require_up()
        for stream in self._streams:
            stream.put_nowait(envelope)

    async def ready(self, seconds: float) -> bool:
        await asyncio.sleep(0.001)
        return self.up

    async def namespaces(self) -> list[str]:
        self._require_up()
        return [NAMESPACE]

    async def ids(self, namespace: str) -> list[str]:
        self._require_up()
        return list(self.records)

    async def container(self, namespace: str, id: str) -> containers_pb2.Container | None:
        self._require_up()
        if self.unanswered:
            self.unanswered -= 1
            raise ContainerdUnreachable("the connection was closed")
        self.looked.append(id)
        if id in self.too_large:
            raise RecordTooLarge(id)
        return self.records.get(id)

    async def task(self, namespace: str, id: str) -> process_pb2.Process | None:
        self._require_up()
        if id in self.silent:
            raise ContainerdRefused("ttrpc: closed", code="UNKNOWN")
        lingering = self.lingering.get(id, [])
        found = self.task_of.get(id) or (lingering.pop() if lingering else None)
        await asyncio.sleep(0)  # the answer may be old when it arrives
        return found

    async def ask(self, container: KnownContainer, address: str) -> Reported:
        self.asked.append(container.id)
        await asyncio.sleep(0)
        if "kybernate" not in container.runtime:
            return Reported(foreign=True)
        return Reported(self.statuses.get(container.id))
