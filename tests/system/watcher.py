"""The small agent as a process, and a client that follows it over every restart and keeps what it is told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from kybernate.agent.watch.hub import identity
from kybernate.messages import agent_pb2 as api
from kybernate.messages import agent_pb2_grpc
from kybernate.node.lookup import gpu_word, task_word
from tests.system.ctr import eventually

ROOT = Path(__file__).parents[2]


class SmallAgent:
    """The process; `kill` and `start` may follow each other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = f"unix:{directory}/agent.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def start(self) -> None:
        argv = [sys.executable, "-m", "tests.system.small_agent", str(self.directory)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """SIGKILL, at any moment."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def call(self, method: str, request: Any) -> Any:
        with grpc.insecure_channel(self.socket) as channel:
            stub = agent_pb2_grpc.InventoryStub(channel)
            return getattr(stub, method)(request, timeout=30, wait_for_ready=True)

    def containers(self) -> list[api.Container]:
        return list(self.call("ListContainers", api.ListContainersRequest(all=True)).containers)


class Watcher:
    """A client: `objects` by kind and key, and `events` as they came. It comes back as often as it must."""

    def __init__(self, socket: str) -> None:
        self.objects: dict[tuple[str, str], Any] = {}
        self.events: list[api.Event] = []
        self.snapshots = 0
        self.heard: list[tuple[float, Any]] = []  # when each change came, and its object
        self._socket = socket
        self._fresh: dict[tuple[str, str], Any] | None = None
        self._position = api.WatchRequest()
        self._ended = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def container(self, id: str) -> api.Container:
        return self.objects.get(("container", f"default/{id}"), api.Container())

    def states(self, id: str) -> tuple[str, str]:
        """Return the words for a container's state and for that of its GPU memory."""
        return task_word(self.container(id).state), gpu_word(self.container(id).gpu)

    def types(self, id: str) -> list[str]:
        return [event.type for event in self.events if event.container == id]

    def close(self) -> None:
        self._ended.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(10)

    def _follow(self) -> None:
        while not self._ended.is_set():
            with suppress(grpc.RpcError), grpc.insecure_channel(self._socket) as channel:
                self._call = agent_pb2_grpc.InventoryStub(channel).Watch(self._position)
                for change in self._call:
                    self._apply(change)
            self._fresh = None
            self._ended.wait(0.05)

    def _apply(self, change: api.Change) -> None:
        self._position.revision, self._position.instance = change.revision, change.instance
        if change.bookmark == api.BOOKMARK_SNAPSHOT_BEGIN:
            self._fresh = {}
            self.snapshots += 1
        elif change.bookmark == api.BOOKMARK_SNAPSHOT_END:
            self.objects, self._fresh = self._fresh or {}, None
        else:
            self._keep(getattr(change, change.WhichOneof("object") or ""), removed=change.removed)

    def _keep(self, message: Any, *, removed: bool) -> None:
        self.heard.append((time.time(), message))
        kind, key = identity(message)
        objects = self.objects if self._fresh is None else self._fresh
        if kind == "event":
            self.events.append(message)
        elif removed:
            objects.pop((kind, key), None)
        else:
            objects[kind, key] = message


@contextmanager
def small_agent(directory: Path) -> Iterator[SmallAgent]:
    """Run the small agent, whose inventory is complete when this returns."""
    agent = SmallAgent(directory)
    agent.start()
    try:
        eventually(lambda: agent.containers() is not None, seconds=30)
        yield agent
    finally:
        agent.kill()


@contextmanager
def watching(agent: SmallAgent) -> Iterator[Watcher]:
    watcher = Watcher(agent.socket)
    try:
        yield watcher
    finally:
        watcher.close()
