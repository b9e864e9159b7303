"""What the program does, by its command line, in this very process: without a fork server, and inside one's child."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kybernate_shim import __version__
from kybernate_shim.errors import Invalid
from kybernate_shim.invocation import Invocation, parse


def run(argv: Sequence[str], *, without_server: str = "") -> int:
    """Do what `argv`, without the program's name, asks and return the exit status. Errors are one line on stderr.

    `without_server` is why no fork server has done it, for the daemon's log.
    """
    try:
        invocation = required(argv)
    except Invalid as error:
        sys.stderr.write(explained(error))
        return 2
    return _act(invocation._replace(without_server=without_server))


def required(argv: Sequence[str]) -> Invocation:
    """Parse `argv` and return it if nothing is missing. Raises Invalid."""
    invocation = parse(argv)
    if invocation.v or invocation.info:
        return invocation
    if not invocation.namespace:
        raise Invalid("no -namespace given")
    if not invocation.id:
        raise Invalid("no -id given")
    if not invocation.action:
        raise Invalid("no action given: containerd starts the daemon itself through `start`")
    return invocation


def explained(error: Invalid) -> str:
    return f"containerd-shim-kybernate-v1: {error}\n"


def _act(invocation: Invocation) -> int:
    """Each action imports only what it needs: `start` and `delete` are on the way of every container."""
    if invocation.v:
        sys.stdout.write(
            f"containerd-shim-kybernate-v1:\n  Version: {__version__}\n  Python: {sys.version.split()[0]}\n"
        )
        return 0
    if invocation.info:
        from kybernate_shim.info import info

        return info()
    if invocation.action == "start":
        from kybernate_shim.start import start

        return start(invocation)
    from kybernate_shim.delete import delete

    return delete(invocation)
