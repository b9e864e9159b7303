"""OOM kills of a container, published as the kernel reports them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import Message

from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.cgroup.oom import OomWatch
from kybernate_shim.logs import Log
from kybernate_shim.messages import events_pb2 as events


class OomReports:
    """Watches the cgroup of one container from `watch` to `stop`."""

    def __init__(self, container: str, publish: Callable[[str, Message], None], log: Log) -> None:
        self._container = container
        self._publish = publish
        self._log = log
        self._watch: OomWatch | None = None

    def watch(self, cgroup: Cgroup) -> None:
        """Publish every OOM kill from now on; without notices of the kernel, none."""
        try:
            self._watch = OomWatch(cgroup)
        except OSError as error:
            self._log.warning("oom.not_watched", error=str(error))
            return
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self.report)

    def report(self) -> None:
        """Publish an OOM kill as soon as the kernel reports it, and again at the exit: the notice may be pending."""
        if self._watch is not None and self._watch.read():
            self._publish("/tasks/oom", events.TaskOOM(container_id=self._container))

    def stop(self) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None
