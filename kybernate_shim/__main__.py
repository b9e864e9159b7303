"""The program `containerd-shim-kybernate-v1`: what containerd runs for every container.

Each action imports only what it needs: `start` and `delete` are on the way of every container.
"""

from __future__ import annotations

import sys

from kybernate_shim import __version__
from kybernate_shim.invocation import BadInvocation, Invocation, parse


def main() -> int:
    """Do what the command line asks and return the exit status. Errors are one line on stderr."""
    try:
        return _act(parse(sys.argv[1:]))
    except BadInvocation as error:
        sys.stderr.write(f"containerd-shim-kybernate-v1: {error}\n")
        return 2


def _act(invocation: Invocation) -> int:
    if invocation.v:
        sys.stdout.write(
            f"containerd-shim-kybernate-v1:\n  Version: {__version__}\n  Python: {sys.version.split()[0]}\n"
        )
        return 0
    if invocation.info:
        from kybernate_shim.info import info

        return info()
    if not invocation.namespace:
        raise BadInvocation("no -namespace given")
    if not invocation.id:
        raise BadInvocation("no -id given")
    if invocation.action == "start":
        from kybernate_shim.start import start

        return start(invocation)
    if invocation.action == "delete":
        from kybernate_shim.delete import delete

        return delete(invocation)
    raise BadInvocation("no action given: containerd starts the daemon itself through `start`")


if __name__ == "__main__":
    sys.exit(main())
