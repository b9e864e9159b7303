"""`kybernate version`: what runs on this side, and on the agent's."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import typer

from kybernate.cli.agents import agent_here
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.options import ADDRESS, Address
from kybernate.cli.output import show_fields
from kybernate.node.failure import Failure
from kybernate_shim import __version__

SHIM = "containerd-shim-kybernate-v1"
SECONDS = 10.0
ABSENT = "not found"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(version)


def version(address: Address = ADDRESS, output: Output = Format.TABLE) -> None:
    """Show the versions of client, agent, shim and containerd.

    The shim is the program that containerd of this node would start. Versions of the agent's node come from the agent.
    """
    agent, node, problem = _agent(address)
    document: dict[str, Any] = {
        "client": __version__,
        "agent": agent,
        "shim": _shim(),
        "containerd": node.get("containerd", "") or _containerd(address),
        "node": {name: value for name, value in sorted(node.items()) if name != "kybernate"},
        "problem": problem,
    }
    if show_document(document, output, __version__):
        return
    others = {name: value for name, value in document["node"].items() if name != "containerd"}
    show_fields(
        {
            "client": __version__,
            "agent": agent or problem or "does not run",
            "shim": document["shim"] or ABSENT,
            "containerd": document["containerd"] or "does not answer",
            **others,
        }
    )


def _agent(address: str) -> tuple[str, dict[str, str], str]:
    """Return the agent's version, the versions of its node, and why there are none."""
    try:
        agent = agent_here(address)
        if agent is None:
            return "", {}, ""
        with agent:
            versions = dict(agent.node().versions)
    except Failure as error:
        return "", {}, str(error)
    return versions.get("kybernate", ""), versions, ""


def _shim() -> str:
    """Return the version that the shim of this node prints; "" where there is none."""
    path = shutil.which(SHIM)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, "-v"], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = [line.partition(":")[2].strip() for line in done.stdout.split("\n") if "Version:" in line]
    return found[0] if found else ""


def _containerd(address: str) -> str:
    from google.protobuf.empty_pb2 import Empty

    from kybernate.messages import version_pb2_grpc
    from kybernate.node.containerd import Containerd

    try:
        with Containerd(address) as containerd:
            reply = containerd.call(version_pb2_grpc.VersionStub(containerd.channel).Version, Empty(), timeout=SECONDS)
            return str(reply.version)
    except Failure:
        return ""
