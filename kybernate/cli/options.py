"""The options that commands share, spelled as `ctr` spells them."""

from __future__ import annotations

from typing import Annotated

from kybernate import addresses
from kybernate.cli.declared import Argument, Option

ContainerName = Annotated[
    str,
    Argument("CONTAINER", "Id of a container or its beginning, or [NAMESPACE/]POD[/CONTAINER]."),
]
ImageName = Annotated[
    str,
    Argument(
        "IMAGE", "Name of a checkpoint image, as `kybernate images` lists it, [NAMESPACE/]NAME; or its directory."
    ),
]
Namespace = Annotated[
    str,
    Option(("--namespace", "-n"), "containerd's namespace; all of them by default.", metavar="NAME", default=""),
]
Address = Annotated[
    str, Option(("--address", "-a"), "containerd's socket.", metavar="SOCKET", envvar="CONTAINERD_ADDRESS")
]

Json = Annotated[bool, Option(("--json",), "Print JSON.")]

Wait = Annotated[
    bool,
    Option(("--wait/--no-wait",), "Wait for the end; without, print the id of the agent's operation."),
]

# Of every command that calls the agent, before or after the command's name.
AGENT = Option(("--agent",), "Agent: a context, a socket, or HOST:PORT.", metavar="NAME", default="")

ADDRESS = addresses.CONTAINERD
