"""Parked containers: those that were checkpointed while they were suspended, and ended. A resume restores them.

The image has a label with the container's id, which is there as long as the container is parked. Its record in
containerd stays until then, so that `ctr` and `kybernate ps` still show the container.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import Containerd
from kybernate.node.failure import Failure, Missing
from kybernate.node.restore import remove
from kybernate.registry.catalogue import Catalogue, every
from kybernate.registry.model import Filter
from kybernate.verbs.node import ParkedContainer

PARKED: Final = "kybernate.io/parked"  # label of an operation and of an image: the container's id
NAMESPACE: Final = "kybernate.io/parked-namespace"  # containerd's
LOG: Final = "kybernate.io/parked-log"  # the file that its output is appended to, where it has one
FILE: Final = "file://"
ATTEMPTS: Final = 60
RETRY_SECONDS: Final = 1.0


class Parking:
    """Labels images of parked containers, and finds them. What blocks runs in threads."""

    def __init__(self, catalogue: Callable[[], Catalogue], address: str, log: Any) -> None:
        self._catalogue, self._address, self._log = catalogue, address, log
        self._tasks: set[asyncio.Task[None]] = set()

    def ended(self, operation: wire.Operation) -> None:
        """Note that a container was parked, or restored, by an operation that has ended."""
        if operation.state != wire.SUCCEEDED:
            return
        if operation.verb == "checkpoint" and PARKED in operation.labels:
            self._later(lambda: self.park(operation.result.path, operation.container, operation.namespace))
        elif operation.verb == "restore":
            self._later(lambda: self._unpark(operation.image))

    def park(self, image: str, container: str, namespace: str) -> None:
        """Label an image as that of a parked container. Blocks; raises Failure."""
        with Containerd(self._address) as containerd:
            task = containerd.task(namespace, container)
        output = task.stdout if task is not None else ""
        log = {LOG: output.removeprefix(FILE)} if output.startswith(FILE) else {}
        self._catalogue().label(image, {PARKED: container, NAMESPACE: namespace, **log})

    def find(self, name: str) -> ParkedContainer | None:
        """Return the parked container that a name, its id or the beginning of one, means. Blocks; raises Failure."""
        found = {one.id: one for one in self._all() if one.id.startswith(name)}
        return found.get(name) or (next(iter(found.values())) if len(found) == 1 else None)

    def known(self, name: str) -> ParkedContainer | None:
        """Return the parked container that a name means, None also where the registry does not answer. Blocks.

        A registry that does not answer stops no resume of what is suspended.
        """
        try:
            return self.find(name)
        except Failure as error:
            self._log.warning("parking.not_searched", container=name, error=str(error))
            return None

    def freed(self, name: str) -> ParkedContainer | None:
        """Return the parked container that a name means, and free its name; None where it has processes. Blocks."""
        parked = self.known(name)
        try:
            return parked if parked is not None and self.make_way(parked) else None
        except Failure as error:
            self._log.warning("parking.not_searched", container=name, error=str(error))
            return None

    def make_way(self, parked: ParkedContainer) -> bool:
        """Remove the record of a parked container, whose name its restore takes; return whether it has no processes.

        Blocks; raises Failure.
        """
        with Containerd(self._address) as containerd:
            known = containerd.container(parked.namespace, parked.id)
            if known is None:
                return True
            task = containerd.task(parked.namespace, parked.id)
            if task is not None and task.pid and known[0].live:
                return False
            remove(containerd, known[0])
        return True

    def _all(self) -> list[ParkedContainer]:
        """Return all parked containers; of several images of one, the newest counts."""
        found: dict[str, ParkedContainer] = {}
        for row in every(self._catalogue(), Filter()):  # newest first
            if id := row.annotations.labels.get(PARKED):
                labels = row.annotations.labels
                parked = ParkedContainer(id, labels.get(NAMESPACE, "default"), row.id, labels.get(LOG, ""))
                found.setdefault(id, parked)
        return list(found.values())

    def _unpark(self, image: str) -> None:
        row = self._catalogue().get(image)
        if PARKED in row.annotations.labels:
            self._catalogue().label(image, {}, [PARKED, NAMESPACE, LOG])

    def _later(self, work: Callable[[], None]) -> None:
        async def do() -> None:
            for attempt in range(ATTEMPTS):
                try:
                    await asyncio.to_thread(work)
                    return
                except Missing as error:  # it will be in a moment, by the same end of the operation
                    last: Failure = error
                except Failure as error:
                    last = error
                    self._log.warning("parking.not_noted", error=str(error), advice=error.advice, attempt=attempt)
                await asyncio.sleep(RETRY_SECONDS)
            self._log.error("parking.not_noted", error=str(last), advice=last.advice)

        task = asyncio.get_running_loop().create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
