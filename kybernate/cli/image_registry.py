"""What `kybernate push` and `pull` share: the options by which an image registry is reached."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kybernate.cli.reporting import not_installed

if TYPE_CHECKING:
    from kybernate.export.registry_client import Connection

MOST_PARALLEL = 64

PlainHttp = Annotated[
    bool, typer.Option("--plain-http", help="Connect without TLS, the default for a registry on localhost.")
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", help="File with the CA certificates for the registry.", show_default="the system's"
    ),
]
CredentialsFile = Annotated[
    Path | None,
    typer.Option(
        "--credentials", metavar="FILE", help="Credentials, as `docker login` writes them.",
        show_default="$DOCKER_CONFIG/config.json or ~/.docker/config.json",
    ),
]  # fmt: skip
Parallel = Annotated[
    int, typer.Option("--parallel", metavar="N", min=1, max=MOST_PARALLEL, help="Number of parallel requests.")
]


def connection(
    host: str, *, plain_http: bool, ca: Path | None, file: Path | None, parallel: int, mount_from: str = ""
) -> Connection:
    """Return how a registry is reached. Raises Unavailable and Failure."""
    try:
        import zstandard  # noqa: F401

        from kybernate.export.registry_client import Connection
    except ModuleNotFoundError as error:
        raise not_installed("an image registry", error, "oci") from error
    from kybernate.export.credentials import credentials_for

    return Connection(credentials_for(host, file), plain_http, ca, mount_from, parallel)
