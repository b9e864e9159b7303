"""The agent of this node, for commands that have it do the work where it runs, and do it themselves where none does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kybernate import addresses
from kybernate.cli.output import moment
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted
from kybernate.node.failure import Refused, Unavailable

if TYPE_CHECKING:
    from kybernate.client import Agent, Operation
    from kybernate.messages import agent_pb2 as wire

OFF, LOCAL = "none", "local"  # instead of a name: no agent, and this node's own


NO_AGENT_ADVICE: Final = "start one with `systemctl start kybernate-agent` or `kybernate agent`"


def chosen() -> str:
    """Return the agent that --agent, $KYBERNATE_AGENT or the current context names; "" is this node's own."""
    named = os.environ.get(addresses.AGENT_VARIABLE, "")
    if not named and any(map(os.path.exists, _files_of_contexts())):
        from kybernate.client.contexts import load  # most nodes have no file of contexts

        named = load().current
    return "" if named == LOCAL else named


def _files_of_contexts() -> tuple[str, str]:
    """Return where contexts.py reads them from. It is not loaded for that: it loads gRPC."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    home = base if base.startswith("/") else os.path.expanduser("~/.config")  # noqa: PTH111  # pathlib raises
    return "/etc/kybernate/client.toml", f"{home}/kybernate/client.toml"


def is_remote() -> bool:
    """Return whether commands call the agent of another machine. Raises Missing and Failure."""
    named = chosen()
    if named in ("", OFF):
        return False
    from kybernate.client.target import target_of

    return not target_of(named).address.startswith("unix:")


def require_here(what: str) -> None:
    """Refuse what the command itself does on this node, where another node's agent is chosen. Raises Refused."""
    if is_remote():
        raise Refused(
            f"{what}, and {chosen()} is the agent of another node",
            state="nothing was done",
            advice="run it on that node, or choose this one with `--agent local`",
        )


def agent_here(address: str = addresses.CONTAINERD) -> Agent | None:
    """Return a connection to the chosen agent, or to this node's where one runs.

    An agent serves the containerd that its own configuration names. So there is none for another `address`, unless
    --agent, $KYBERNATE_AGENT or the current context names it.
    """
    named = chosen()
    if named:
        return None if named == OFF else _agent(named)
    usual = Path(address.removeprefix("unix://")).resolve() == Path(addresses.CONTAINERD).resolve()
    return _agent(addresses.AGENT) if usual and _answers() else None


def _agent(address: str) -> Agent:
    from kybernate.client import Agent  # it loads gRPC, which takes longer than to find that no agent runs

    return Agent(address)


def _answers() -> bool:
    """Return whether a process accepts connections: a killed agent leaves its socket. Raises Refused."""
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(addresses.AGENT)
        except PermissionError as error:
            raise Refused(
                f"this user may not connect to the agent on {addresses.AGENT}",
                advice="run as root; members of the group `kybernate` have read-only access",
            ) from error
        except OSError:
            return False
    return True


@contextmanager
def agent_or_none(address: str = addresses.CONTAINERD) -> Iterator[Agent | None]:
    """Connect to the agent where one runs, for the block."""
    agent = agent_here(address)
    if agent is None:
        yield None
        return
    with agent:
        yield agent


def require_wait(wait: bool) -> None:
    """Refuse --no-wait where the command itself does the work. Raises Unavailable."""
    if not wait:
        raise Unavailable(
            "--no-wait needs an agent, and none runs on this node", state="nothing was started", advice=NO_AGENT_ADVICE
        )


@contextmanager
def required_agent() -> Iterator[Agent]:
    """Connect to the agent. Raises Unavailable where none runs."""
    agent = agent_here()
    if agent is None:
        place = addresses.AGENT if chosen() != OFF else f"${addresses.AGENT_VARIABLE}"
        raise Unavailable(f"no agent runs on this node: nothing listens on {place}", advice=NO_AGENT_ADVICE)
    with agent:
        yield agent


def named_here(image: str) -> str:
    """Return what an agent, which works in another directory, knows a relative path by; a name is as it is."""
    if not image.startswith(("./", "../")):
        return image
    return os.path.abspath(image)  # noqa: PTH100  # resolve() follows links, and the registry has none


def finished(operation: Operation, timeout: float | None = None) -> wire.Operation:
    """Wait for an operation with a progress bar, and return its last state when it has succeeded.

    Raises OperationFailed, NotFinished, and Interrupted after Ctrl-C, which leaves the operation alone.
    """
    first = operation.state
    subject = first.container_title or first.container or first.image
    try:
        with Bar(f"{first.verb} {subject}") as bar:
            for state in operation.follow(timeout):
                bar.show_progress(state.progress)
        operation.result()
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted",
            state=f"operation {operation.id} ({first.verb} of {subject}) continues",
            advice=f"`kybernate wait {operation.id}` waits for it, `kybernate cancel {operation.id}` undoes it",
        ) from None
    return operation.state


def seconds_of(operation: wire.Operation) -> float:
    """Return how long an operation that has ended took, from its beginning on."""
    return moment(operation.ended) - moment(operation.started)
