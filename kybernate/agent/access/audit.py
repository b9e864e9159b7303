"""The agent's lines in the node's audit log: one for each call that changes something, or would have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from kybernate.agent.access.caller import Caller
from kybernate.agent.access.limits import Buckets
from kybernate.messages.agent_pb2 import Operation
from kybernate_shim.config import Config
from kybernate_shim.trust import caller as shim_caller
from kybernate_shim.trust.audit import Audit, Decision, ImageRef, Verb, write
from kybernate_shim.trust.requester import NODE, Requester

REFUSALS_PER_MINUTE: Final = 60  # of one caller; those beyond it are counted in the next line


@dataclass
class AuditLog:
    """Writes the lines; `config` are the settings of the shims, which name the file."""

    config: Callable[[], Config]
    log: Any
    buckets: Buckets
    _left_out: Counter[str] = field(default_factory=Counter)

    def allowed(self, verb: str, method: str, caller: Caller, request: Any, answer: Any) -> None:
        """Note a call that was answered; of an operation, its id is the reason."""
        reason = f"operation {answer.id}" if isinstance(answer, Operation) else ""
        self._write(verb, "allowed", method, caller, _subject(request, answer), reason)

    def refused(self, verb: str, decision: Decision, method: str, caller: Caller, request: Any, reason: str) -> None:
        """Note a call that was not. Refusals without end do not fill the disk."""
        if not self.buckets.take(f"audit {caller.key}", REFUSALS_PER_MINUTE):
            self._left_out[caller.key] += 1
            return
        if more := self._left_out.pop(caller.key, 0):
            reason = f"{reason} (and {more} refusals before it that have no line)"
        self._write(verb, decision, method, caller, _subject(request, None), reason)

    def _write(
        self, verb: str, decision: Decision, method: str, caller: Caller, subject: _Subject, reason: str
    ) -> None:
        _, service, name = method.split("/")
        known = shim_caller.Caller(service, name, caller.uid, caller.pid, _name(caller))
        record = Audit(
            cast(Verb, verb),
            decision,
            requester=_requester(caller),
            task=subject.task or (caller.container.id if caller.container else ""),
            containerd_namespace=subject.namespace,
            image=ImageRef(path=subject.image),
            reason=reason,
            caller=known,
        )
        write(record, self.config(), self.log)


@dataclass(frozen=True)
class _Subject:
    """What a call is about: in the words of the request, or, where an operation was made of it, as it was found."""

    task: str
    namespace: str
    image: str


def _subject(request: Any, answer: Any) -> _Subject:
    if isinstance(answer, Operation):
        return _Subject(answer.container, answer.namespace, answer.image)
    task = _text(request, "name") or _text(request, "leaving") or _text(request, "id")
    return _Subject(task, _text(request, "namespace"), _text(request, "image") or _text(request, "path"))


def _text(message: Any, field: str) -> str:
    return str(getattr(message, field, ""))


def _name(caller: Caller) -> str:
    return f"container {caller.container.id}" if caller.container else caller.name


def _requester(caller: Caller) -> Requester:
    """Return who asks: the author of a pod through its container, else the node's root."""
    one = caller.container
    if one is None or not one.pod:
        return NODE
    return Requester("tenant", namespace=one.pod_namespace, pod=one.pod, container=one.name)
