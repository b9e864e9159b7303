"""`kybernate page`: a link to the node's web page, and the program that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.reporting import not_installed
from kybernate.node.failure import Invalid

LISTEN = "127.0.0.1:7070"


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(invoke_without_command=True, help="Print a link to the web page, or serve it.")
    group.callback()(page)
    group.command()(serve)
    app.add_typer(group, name="page")


def page(
    context: typer.Context,
    role: Annotated[str, typer.Option(metavar="ROLE", help="Role of the session: operator or viewer.")] = "operator",
    hours: Annotated[
        float, typer.Option(min=0.01, max=8760, metavar="HOURS", help="Hours until the session ends.")
    ] = 12,
    socket: Annotated[Path, typer.Option(metavar="FILE", help="Socket of the page's program.")] = Path(
        "/run/kybernate/page.sock"
    ),
) -> None:
    """Print a link that begins a session on the page, once, within ten minutes."""
    if context.invoked_subcommand is not None:
        return
    try:
        from kybernate.page.access import Role  # what it loads, no other command needs
        from kybernate.page.program import link
    except ImportError as error:
        raise not_installed("the page", error, "page,agent") from error
    if role not in list(Role):
        raise typer.BadParameter(f"{role!r} is not a role: use operator or viewer", param_hint="--role")
    typer.echo(link(Role(role), 3600 * hours, socket))


def serve(
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="HOST:PORT of the page.")] = LISTEN,
    url: Annotated[str, typer.Option(metavar="URL", help="Base URL of links, behind a reverse proxy.")] = "",
    agent: Annotated[str, typer.Option(metavar="ADDRESS", help="The agent; by default the node's own.")] = "",
    proxy: Annotated[str, typer.Option(metavar="URL", help="Kybernate's proxy, for the playground.")] = "",
    proxy_key: Annotated[
        str, typer.Option(metavar="KEY", envvar="KYBERNATE_PROXY_KEY", help="Key for the proxy.")
    ] = "",
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate, to serve TLS.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of the certificate.")] = None,
    plaintext: Annotated[bool, typer.Option("--plaintext", help="Let other machines connect without TLS.")] = False,
    socket: Annotated[Path, typer.Option(metavar="FILE", help="Socket on which links are requested.")] = Path(
        "/run/kybernate/page.sock"
    ),
    session_key: Annotated[Path, typer.Option(metavar="FILE", help="Key that signs sessions.")] = Path(
        "/var/lib/kybernate/page.key"
    ),
) -> None:
    """Serve the web page until SIGTERM."""
    try:
        from kybernate.page import program  # what it loads, no other command needs
    except ImportError as error:
        raise not_installed("the page", error, "page,agent") from error
    try:
        host, port = program.address_of(listen)
    except ValueError as error:
        raise Invalid(
            f"{listen!r} is not an address",
            advice="write HOST:PORT, such as 127.0.0.1:7070, or :7070 for all addresses of the node",
        ) from error
    try:
        program.host_of(url)
    except ValueError as error:
        raise Invalid(
            f"{url!r} is not a URL: {error}", advice="write https://HOST or http://HOST, with its port"
        ) from error
    serving = program.Serving(
        host, port, url, agent, proxy, proxy_key, certificate, key, socket, session_key, plaintext
    )
    program.run(serving)
