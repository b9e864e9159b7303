"""`kybernate proxy`: an address that always answers, in the foreground, as a service manager starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kybernate.node.failure import Failure


class ProxyNotInstalled(Failure):
    """A package that the proxy needs is not installed."""

    advice = "pip install 'kybernate[proxy,agent]' into the environment of this command"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(proxy)


def proxy(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The proxy's settings.")] = Path(
        "/etc/kybernate/proxy.yaml"
    ),
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration that HAProxy gets, and exit.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Examine the settings and exit.")] = False,
) -> None:
    """Answer for models that sleep, and wake them; until SIGTERM."""
    try:
        from kybernate.proxy import program, settings  # what it loads, no other command needs
    except ImportError as error:
        raise ProxyNotInstalled(f"the proxy cannot be loaded: {error}") from error
    if print_config:
        from kybernate.proxy.haproxy.plane import printed

        typer.echo(printed(settings.load(config)), nl=False)
    elif check:
        settings.load(config)
    else:
        program.run(config)
