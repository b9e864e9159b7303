"""The options that commands share, spelled as `ctr` spells them."""

from __future__ import annotations

from typing import Annotated

from kybernate import addresses
from kybernate.cli.declared import Argument, Option

ContainerName = Annotated[
    str,
    Argument("CONTAINER", "Id of a container or its beginning, or [NAMESPACE/]POD[/CONTAINER].", "a_container"),
]
ImageName = Annotated[
    str,
    Argument(
        "IMAGE",
        "Name of a checkpoint image, as `kybernate images` lists it, [NAMESPACE/]NAME; its id; or its directory.",
        "an_image",
    ),
]
Namespace = Annotated[
    str,
    Option(("--namespace", "-n"), "containerd's namespace; all of them by default.", metavar="NAME", default=""),
]
Address = Annotated[
    str, Option(("--address", "-a"), "containerd's socket.", metavar="SOCKET", envvar="CONTAINERD_ADDRESS")
]

Wait = Annotated[
    bool,
    Option(("--wait/--no-wait",), "Wait for the end, or print the id of the operation and return."),
]

# Of every command that calls the agent, before or after the command's name.
AGENT = Option(("--agent",), "Agent: a context, a socket, or HOST:PORT.", metavar="NAME", default="")

ADDRESS = addresses.CONTAINERD
