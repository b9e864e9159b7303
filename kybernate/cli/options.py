"""The options that commands share, spelled as `ctr` spells them."""

from __future__ import annotations

from typing import Annotated

import typer

from kybernate.node.containerd import DEFAULT_ADDRESS

ContainerName = Annotated[
    str,
    typer.Argument(
        metavar="CONTAINER",
        help="Id of a container or its beginning, or [NAMESPACE/]POD[/CONTAINER].",
        show_default=False,
    ),
]
ImageName = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE",
        help="Name of a checkpoint image, as `kybernate images` lists it, [NAMESPACE/]NAME; or its directory.",
        show_default=False,
    ),
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="containerd's namespace; all of them by default.", show_default=False
    ),
]
Address = Annotated[
    str, typer.Option("--address", "-a", metavar="SOCKET", help="containerd's socket.", envvar="CONTAINERD_ADDRESS")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

ADDRESS = DEFAULT_ADDRESS
