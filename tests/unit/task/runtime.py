"""A container whose OCI runtime follows a script, and whose processes end when a test says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import structlog
from google.protobuf.message import Message

from kybernate_shim.config import Config, Deadlines
from kybernate_shim.linux.children import Children, Exit
from kybernate_shim.messages import events_pb2 as events
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.runtime import Runtime
from kybernate_shim.oci.spec import Spec
from kybernate_shim.task.container import Container
from kybernate_shim.task.stdio import StdioConfig

INIT, EXEC = 1 << 30, (1 << 30) + 1  # beyond every pid that the kernel gives
SILENT = StdioConfig("", "", "", terminal=False)
SPEC = {"linux": {"namespaces": [{"type": "pid"}]}}

Act = Callable[[], Awaitable[None] | None]


@dataclass
class ScriptedRuntime:
    """Notes each call as "verb argument…", then does what `on` has for the verb: raise, end a process, or wait."""

    calls: list[str] = field(default_factory=list)
    on: dict[str, Act] = field(default_factory=dict)
    waiting: int | None = None  # the init that a start was told of
    deadlines: Deadlines = field(default_factory=Deadlines)
    cli: Cli = field(default_factory=lambda: Cli(Path("/bin/runc"), Path("/run/runc/ns"), None))

    async def _do(self, verb: str, *arguments: object) -> None:
        self.calls.append(" ".join([verb, *map(str, arguments)]))
        if (act := self.on.get(verb)) and (waiting := act()) is not None:
            await waiting

    async def create(self, container: str, bundle: Bundle, **_: Any) -> None:
        bundle.init_pid_file.write_text(str(INIT))
        await self._do("create")

    async def start(self, container: str, *, waiting: int | None) -> None:
        self.waiting = waiting
        await self._do("start")

    async def exec(self, container: str, bundle: Bundle, exec_id: str, **_: Any) -> None:
        bundle.exec_pid_file(exec_id).write_text(str(EXEC))
        await self._do("exec", exec_id)

    async def kill(self, container: str, signal: int, *, all: bool = False, init: int = 0, cgroup: Any = None) -> None:
        await self._do("kill", signal, *(["all"] if all else []))

    async def delete(self, container: str, *, force: bool) -> None:
        await self._do("delete", *(["force"] if force else []))

    async def pause(self, container: str, cgroup: object) -> None:
        await self._do("pause")

    async def resume(self, container: str, cgroup: object) -> None:
        await self._do("resume")

    async def update(self, container: str, resources: bytes) -> None:
        await self._do("update", resources.decode())


class Life:
    """One container in the hands of a test."""

    def __init__(self, directory: Path, *, spec: dict[str, Any] = SPEC) -> None:
        self.runtime = ScriptedRuntime()
        self.children = Children()
        self.told: list[tuple[str, Any]] = []
        self.container = Container(
            "c1",
            namespace="ns",
            bundle=Bundle(directory),
            spec=Spec(spec),
            options=RuntimeOptions(),
            config=Config(),
            runtime=cast(Runtime, self.runtime),
            children=self.children,
            publish=self._hear,
            log=structlog.get_logger(),
            stdio=SILENT,
        )

    def _hear(self, topic: str, event: Message) -> None:
        self.told.append((topic.removeprefix("/tasks/"), event))

    @property
    def topics(self) -> list[str]:
        """The events so far; an exit with the id of its process."""
        return [f"exit {event.id}" if topic == "exit" else topic for topic, event in self.told]

    def end(self, pid: int, status: int = 0) -> None:
        """Let the kernel report the end of a process."""
        self.children._ended(Exit(pid, status, 1_700_000_000_000_000_000))

    async def create(self) -> None:
        await self.container.create([], events.TaskCreate(container_id="c1"))

    async def run(self) -> None:
        await self.create()
        await self.container.start()

    def add_exec(self, exec_id: str = "e1") -> None:
        self.container.execs.add(exec_id, SILENT, json.dumps({"args": ["true"]}).encode())

    async def run_exec(self, exec_id: str = "e1") -> None:
        self.add_exec(exec_id)
        await self.container.execs.start(exec_id)


async def settled() -> None:
    """Let everything run that waits for nothing."""
    for _ in range(10):
        await asyncio.sleep(0)
