"""The node agent: whether it runs and answers, of which release it is, and who may ask it."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

from kybernate.agent.settings import Settings
from kybernate.agent.sockets import FOR_READERS, group_of
from kybernate.node.failure import Failure
from kybernate.node.finding import HealthFinding
from kybernate_shim import __version__
from kybernate_shim.linux.process import is_nodes_own

CONNECT_SECONDS: Final = 5.0
Answer = Literal["answers", "absent", "denied", "silent", "refused"]


@dataclass(frozen=True)
class AgentFacts:
    """What was found. `group` is the readers', None where the node has none of that name; `owner` the socket's."""

    socket: Path
    answer: Answer = "absent"
    words: str = ""
    version: str = ""
    pid: int = 0
    reader_group: str = ""
    group: int | None = None
    owner: int = 0
    mode: int = 0


# ---- what it means


def findings(facts: AgentFacts) -> Iterator[HealthFinding]:
    """Yield what is found of the agent; a node without one lacks operations, tiers and events, and no container."""
    subject, restart = "agent", "`systemctl restart kybernate-agent`: containers and what shims do are not affected"
    if facts.answer == "absent":
        left = f"nothing listens on {facts.socket}" if facts.words else "does not run"
        advice = "`systemctl enable --now kybernate-agent.socket kybernate-agent.service`; commands work without it"
        yield HealthFinding(subject, "note", left, advice)
    elif facts.answer == "denied":
        advice = f"run as root, or as a member of the group {facts.reader_group}"
        yield HealthFinding(subject, "note", f"this user may not ask on {facts.socket}", advice)
    elif facts.answer == "silent":
        found = f"no answer on {facts.socket} in time"
        halted = f"`kill -CONT {facts.pid}` continues it" if facts.words == "halted" else restart
        yield HealthFinding(subject, "bad", f"{found}; process {facts.pid or 'unknown'} {facts.words}".strip(), halted)
    elif facts.answer == "refused":
        yield HealthFinding(subject, "bad", facts.words, "`journalctl -u kybernate-agent` shows why")
    elif facts.version != __version__:
        found = f"is of version {facts.version}, this command of version {__version__}"
        yield HealthFinding(subject, "bad", found, restart)
    else:
        yield HealthFinding(subject, "ok", f"{facts.socket} answers, version {facts.version}")
    if facts.answer == "answers":
        yield _readers(facts)


def _readers(facts: AgentFacts) -> HealthFinding:
    subject = "agent's readers"
    if not facts.reader_group:
        return HealthFinding(subject, "ok", "none: root alone may ask")
    if facts.group is None:
        advice = f"`groupadd --system {facts.reader_group}`, then restart the agent"
        return HealthFinding(
            subject, "note", f"the group {facts.reader_group} does not exist: root alone may ask", advice
        )
    if (facts.owner, facts.mode) != (facts.group, FOR_READERS):
        found = f"{facts.socket} has group {facts.owner} and mode {facts.mode:04o}"
        advice = f"`chgrp {facts.reader_group} {facts.socket}` and `chmod 0660` of it, or restart the agent's socket"
        return HealthFinding(subject, "note", found, advice)
    return HealthFinding(subject, "ok", f"members of the group {facts.reader_group} may look")


# ---- what is there


def gather(settings: Settings) -> AgentFacts:
    """Ask the agent for the node; no call lasts longer than its deadline."""
    facts = AgentFacts(settings.socket, reader_group=settings.reader_group, group=group_of(settings.reader_group))
    answer, words = _connected(settings.socket)
    if answer != "answers":
        return _replaced(facts, answer, words)
    status = settings.socket.stat()
    from kybernate.client import Agent, AgentRefused  # gRPC, where there is an agent to be asked

    try:
        with Agent(str(settings.socket)) as agent:
            version = agent.node().versions.get("kybernate", "unknown")
    except AgentRefused as error:
        if error.code == "DEADLINE_EXCEEDED":
            return _replaced(facts, "silent", _state_of(pid_of_service()), pid_of_service())
        return _replaced(facts, "denied" if error.code == "PERMISSION_DENIED" else "refused", str(error))
    except Failure as error:
        return _replaced(facts, "refused", str(error))
    return AgentFacts(
        settings.socket, "answers", "", version, pid_of_service(), settings.reader_group, facts.group,
        status.st_gid, stat.S_IMODE(status.st_mode),
    )  # fmt: skip


def pid_of_service() -> int:
    """Return the process of the agent on this node, 0 where none is found."""
    for process in psutil.process_iter(["pid"]):
        if not is_nodes_own(process.pid):
            continue
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(Path(word).name == "kybernate" for word in words[:3]) and "agent" in words[1:4]:
            return int(process.pid)
    return 0


def _replaced(facts: AgentFacts, answer: Answer, words: str, pid: int = 0) -> AgentFacts:
    return AgentFacts(facts.socket, answer, words, pid=pid, reader_group=facts.reader_group, group=facts.group)


def _connected(path: Path) -> tuple[Answer, str]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(str(path))
        except FileNotFoundError:
            return "absent", ""
        except PermissionError:
            return "denied", ""
        except ConnectionRefusedError:
            return "absent", "left by an agent that was killed"
        except OSError as error:
            return "refused", f"{path}: {error.strerror or error}"
    return "answers", ""


def _state_of(pid: int) -> str:
    try:
        return "halted" if pid and psutil.Process(pid).status() == psutil.STATUS_STOPPED else "runs"
    except psutil.Error:
        return ""
