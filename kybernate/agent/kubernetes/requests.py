"""Checkpoints that pods' annotations ask for: which, and that each is done once, whatever ends meanwhile.

`kybernate.io/checkpoint: NAME` on a running pod asks for an image of its container under that name. What was asked for
is in the journal, by the pod's uid, until the pod is gone: neither the same annotation in the next list of pods nor a
restart of the agent does it twice. To ask again after a failure, the annotation is removed and set again.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kybernate.agent.journal import Journal
from kybernate.agent.kubernetes.pods import Pod
from kybernate.agent.kubernetes.story import Told
from kybernate_shim.oci.annotations import CHECKPOINT, DOMAIN, mistake, shown, split

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS annotated (uid TEXT NOT NULL, container TEXT NOT NULL, name TEXT NOT NULL, "
    "key TEXT NOT NULL, operation TEXT NOT NULL DEFAULT '', refused INTEGER NOT NULL DEFAULT 0, "
    "PRIMARY KEY (uid, container, name))",
)


@dataclass(frozen=True)
class Asked:
    """An image of a pod's container that an annotation asks for."""

    container: str
    name: str


@dataclass(frozen=True)
class Known:
    """A request as the journal has it. `key` is that of its operation, whose id is empty until there is one."""

    asked: Asked
    key: str
    operation: str = ""
    refused: bool = False

    @property
    def handled(self) -> bool:
        return bool(self.operation) or self.refused


def asked_of(pod: Pod) -> Iterator[Asked]:
    """Yield what the pod's annotations ask for; one without a container's name is for the only container."""
    for key, value in pod.annotations:
        base, container = split(key)
        if base != CHECKPOINT or mistake(key, value, pod.names) is not None:
            continue
        if container or len(pod.containers) == 1:
            yield Asked(container or pod.containers[0], value)


def mistakes_of(pod: Pod, *, foreign: bool, counts: Collection[str]) -> Iterator[Told]:
    """Yield a warning for each annotation that does not have the effect that its author expects.

    `foreign`: no container of the pod runs under our shim. `counts` are the annotations that pods of this node may use.
    """
    for key, value in pod.annotations:
        base, container = split(key)
        found = mistake(key, value, pod.names)
        if found is not None:
            seen_by_shim = found.loses_state and not foreign and mistake(key, value) is not None
            effect = "No container is started until it is corrected" if seen_by_shim else "It has no effect"
            yield Told("AnnotationMistaken", f"{found}. {effect}", warning=True)
        elif not key.startswith(DOMAIN):
            continue
        elif foreign:
            why = "the pod does not run under Kybernate: its runtimeClassName names another handler"
            yield Told("AnnotationIgnored", f"annotation {key} has no effect: {why}", warning=True)
        elif key not in counts:
            why = "`annotations` in the node's shim.toml does not let pods use it"
            yield Told("AnnotationIgnored", f"annotation {key} has no effect: {why}", warning=True)
        elif base == CHECKPOINT and not container and len(pod.containers) != 1:
            names = ", ".join(f"{CHECKPOINT}.{name}" for name in pod.containers)
            yield Told(
                "CheckpointRefused",
                f"annotation {key}: {shown(value)} is to be the image of which container? Use one of {names}",
                warning=True,
            )


class Requests:
    """What annotations have asked for, in the journal, whose schema must have SCHEMA."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def pods(self) -> set[str]:
        """Return the uids of all pods that have asked for something."""
        query = "SELECT DISTINCT uid FROM annotated"
        return await self._journal.run(lambda it: {str(row["uid"]) for row in it.execute(query)})

    async def of(self, pod_uid: str) -> list[Known]:
        """Return what a pod has asked for."""

        def work(connection: sqlite3.Connection) -> list[Known]:
            rows = connection.execute("SELECT * FROM annotated WHERE uid = ?", (pod_uid,)).fetchall()
            return [
                Known(Asked(row["container"], row["name"]), row["key"], row["operation"], bool(row["refused"]))
                for row in rows
            ]

        return await self._journal.run(work)

    async def add(self, pod_uid: str, asked: Asked) -> Known:
        """Note a request before anything is done for it."""
        known = Known(asked, uuid.uuid4().hex)
        values = (pod_uid, asked.container, asked.name, known.key)
        await self._journal.run(
            lambda it: it.execute("INSERT INTO annotated (uid, container, name, key) VALUES (?, ?, ?, ?)", values)
        )
        return known

    async def settle(self, pod_uid: str, known: Known, *, operation: str = "") -> None:
        """Note that a request has its operation, or was refused for good."""
        values = (operation, int(not operation), pod_uid, known.asked.container, known.asked.name)
        query = "UPDATE annotated SET operation = ?, refused = ? WHERE uid = ? AND container = ? AND name = ?"
        await self._journal.run(lambda it: it.execute(query, values))

    async def forget(self, pod_uid: str, asked: Asked) -> None:
        """Let a request be made again."""
        values = (pod_uid, asked.container, asked.name)
        query = "DELETE FROM annotated WHERE uid = ? AND container = ? AND name = ?"
        await self._journal.run(lambda it: it.execute(query, values))

    async def keep(self, pod_uids: Collection[str]) -> None:
        """Forget what other pods have asked for: they are gone."""

        def work(connection: sqlite3.Connection) -> None:
            known = {row["uid"] for row in connection.execute("SELECT DISTINCT uid FROM annotated")}
            connection.executemany("DELETE FROM annotated WHERE uid = ?", [(one,) for one in known - set(pod_uids)])

        await self._journal.run(work)
