"""Which container a person means: by id, by the beginning of one, or by the name of its pod. Without I/O.

`crictl` and `kubectl` users know names, `ctr` users know ids; both are welcome, and what is ambiguous is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Ambiguous, Missing
from kybernate.node.words import word

ID_LENGTH = 12  # of an id of 64 digits; enough to distinguish containers
UP_PODS: Final = "kybernate-up-"  # how UIDs of pods of `kybernate up` begin; those of an API server are UUIDs
STARTED: Final = frozenset({Container.RUNNING, Container.PAUSING, Container.PAUSED, Container.HELD})
LIVE: Final = STARTED | {Container.CREATED}  # has processes

CONTAINER_NOT_FOUND_ADVICE: Final = (
    "`kybernate ps` lists the containers of Kybernate's shims, `ctr -n NAMESPACE containers ls` all others"
)


@dataclass(frozen=True)
class KnownContainer:
    """containerd's record of a container, and the state of its task. What Kubernetes did not name is empty."""

    namespace: str  # containerd's, for example k8s.io
    id: str
    image: str = ""
    runtime: str = ""
    snapshotter: str = ""
    group: str = ""  # the id under which containers of a pod share a shim
    pod_namespace: str = ""
    pod: str = ""
    name: str = ""
    pod_uid: str = ""
    sandbox: bool = False  # holds a pod's namespaces and runs nothing of the user's
    state: Container.State = Container.NO_TASK
    pid: int = field(default=0, compare=False)
    problem: str = ""  # why nothing but id and task are known

    @property
    def title(self) -> str:
        """The name by which people know it: that of Kubernetes, or else the id."""
        return f"{self.pod_namespace}/{self.pod}/{self.name or '(sandbox)'}" if self.pod else self.id

    @property
    def in_kubernetes(self) -> bool:
        """Return whether its pod is one of Kubernetes, whose author is a tenant: no image's label can claim otherwise.

        By the UID, which kubelet's labels have in any case.
        """
        return bool(self.pod) and not self.pod_uid.startswith(UP_PODS)

    @property
    def live(self) -> bool:
        """Return whether it has processes."""
        return self.state in LIVE

    @property
    def state_word(self) -> str:
        """Return the state of its task, empty without one."""
        return task_word(self.state)


def task_word(state: Container.State) -> str:
    """Return the word for the state of a task; empty without one."""
    return word(Container.State, state) if state != Container.NO_TASK else ""


def gpu_word(state: Container.GpuState) -> str:
    """Return the word for the state of a container's GPU memory, as its shim has it; empty without any."""
    return word(Container.GpuState, state) if state != Container.NO_GPU else ""


def shown_gpu(gpu: str, parked_bytes: int) -> str:
    """Return the state of a container's GPU memory for people: "parked" of one that is suspended, and on the disk."""
    return "parked" if gpu == "suspended" and parked_bytes else gpu


def resolve(query: str, containers: Iterable[KnownContainer]) -> KnownContainer:
    """Return the one container that `query` means.

    In this order: a whole id, the beginning of an id, the id of a pod or its beginning, `POD`, `POD/CONTAINER`,
    `NAMESPACE/POD`, `NAMESPACE/POD/CONTAINER`. Of several that match, one that lives wins over ended ones: the records
    of a container's earlier runs stay in containerd for a while.
    Raises Missing and Ambiguous.
    """
    known = list(containers)
    for found in (_by_id(query, known), _by_prefix(query, known), _by_group(query, known), _by_name(query, known)):
        live = [container for container in found if container.live]
        if len(live) == 1 or len(found) == 1:
            return (live or found)[0]
        if found:
            several = live or found
            raise Ambiguous(
                f"{query!r} is the name of {len(several)} containers:\n{_listed(several)}",
                advice="give more of the id, the name as NAMESPACE/POD/CONTAINER, or containerd's namespace with -n",
            )
    raise Missing(f"no container has the id or the name {query!r}", advice=CONTAINER_NOT_FOUND_ADVICE)


def _by_id(query: str, known: Sequence[KnownContainer]) -> list[KnownContainer]:
    return [container for container in known if container.id == query]


def _by_prefix(query: str, known: Sequence[KnownContainer]) -> list[KnownContainer]:
    return [container for container in known if query and container.id.startswith(query) and not container.sandbox]


def _by_group(query: str, known: Sequence[KnownContainer]) -> list[KnownContainer]:
    """Return the containers of pods whose id begins with `query`, without the sandboxes."""
    inside = [container for container in known if container.group != container.id and not container.sandbox]
    return [container for container in inside if query and container.group.startswith(query)]


def _by_name(query: str, known: Sequence[KnownContainer]) -> list[KnownContainer]:
    words = query.split("/")
    return [container for container in known if container.pod and not container.sandbox and _named(container, words)]


def _named(container: KnownContainer, words: list[str]) -> bool:
    full = [container.pod_namespace, container.pod, container.name]
    return words in (full, full[:2], full[1:], [container.pod])


def _listed(containers: Iterable[KnownContainer]) -> str:
    rows = sorted((one.namespace, one.id, one.title, one.state_word or "no task") for one in containers)
    return "\n".join(f"  {'  '.join(row)}" for row in rows)


def short_id(id: str) -> str:
    """Return the beginning of an id of 64 digits, as Kubernetes makes them; others are names, and stay whole."""
    return id[:ID_LENGTH] if len(id) == 64 else id
