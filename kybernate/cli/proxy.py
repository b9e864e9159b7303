"""`kybernate proxy`: an address that always answers, in the foreground, as a service manager starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.reporting import not_installed
from kybernate.node.failure import Invalid


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
    ext_proc: Annotated[
        str, typer.Option("--ext-proc", metavar="ADDRESS", help="Where Envoy asks by ext_proc: HOST:PORT or unix:PATH.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Examine the settings and exit.")] = False,
) -> None:
    """Answer for models that sleep, and wake them; until SIGTERM."""
    try:
        from kybernate.proxy import document, program, settings  # what it loads, no other command needs
    except ImportError as error:
        raise not_installed("the proxy", error, "proxy,agent") from error
    if print_config:
        from kybernate.proxy.haproxy.plane import printed

        typer.echo(printed(settings.load(config)), nl=False)
    elif check:
        settings.load(config)
    else:
        try:
            document.checked_address(ext_proc or "unix:/")
        except ValueError as error:
            raise Invalid(f"--ext-proc {ext_proc}: {error}") from error
        program.run(config, ext_proc=ext_proc)
