"""Makes an image known to the agent of this node when the command that has brought or changed it ends."""

from __future__ import annotations

from pathlib import Path

import typer

from kybernate.cli.agents import agent_or_none, is_remote
from kybernate.cli.output import printable
from kybernate.client import Agent
from kybernate.client.errors import AgentRefused
from kybernate.node.failure import Failure

GONE = "NOT_FOUND"


def tell_agent(*places: Path) -> None:
    """Have the agent look at directories in which an image has appeared, changed or disappeared.

    Where no agent runs, its next start finds them. One that refuses is a warning: the image itself is there.
    """
    try:
        if is_remote():
            return  # it has not this node's disks
        with agent_or_none() as agent:
            if agent is not None:
                for place in dict.fromkeys(places):
                    _look(agent, place)
    except Failure as error:
        typer.echo(f"kybernate: the agent does not know the image yet: {printable(str(error))}", err=True)


def _look(agent: Agent, place: Path) -> None:
    try:
        agent.image(str(place))
    except AgentRefused as error:
        if error.code != GONE:  # there is none, or it lies below none of the roots
            raise
