"""The program `containerd-shim-kybernate-v1`, as far as it needs an interpreter; see fork_server/client.c."""

import os
import sys

NO_CLIENT = "this program was not written by kybernate_shim.launcher"


def main(why: str = NO_CLIENT) -> int:
    """Do what the command line asks and return the exit status. Errors are one line on stderr.

    `why` is what kept a fork server from doing it.
    """
    from kybernate_shim.actions import run

    return run(sys.argv[1:], without_server=why)


def run_launched() -> None:
    """Be the program, executed by client.c or a script without site, with `why` as the first word; ends the process."""
    _enter_site()
    status = main(sys.argv.pop(1))
    sys.stdout.flush()
    os._exit(status)  # at once: taking an interpreter down in order takes its time


def leave_server() -> None:
    """Leave a fork server behind for client.c, which waits for the end of this process."""
    _enter_site()
    from kybernate_shim.fork_server.server import leave

    leave()
    os._exit(0)


def _enter_site() -> None:
    """Make installed packages importable: the interpreter was told not to, because that takes its time."""
    import site

    site.main()


if __name__ == "__main__":
    sys.exit(main())
