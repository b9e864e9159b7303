"""The program `containerd-shim-kybernate-v1`: what containerd runs for every container.

`start` and `delete` are on the way of every container, and mostly another process does them, the fork server: until it
is known that nobody does, nothing is imported that an interpreter does not have anyway.
"""

import posix
import sys

from kybernate_shim.deleted import left_answer
from kybernate_shim.fork_server import client


def main() -> int:
    """Do what the command line asks and return the exit status. Errors are one line on stderr."""
    argv, why = sys.argv[1:], ""
    if argv[-1:] == ["delete"] and (answer := left_answer(argv)) is not None:
        posix.write(1, answer)
        return 0
    if argv and argv[-1] in client.PATIENCE:
        try:
            return _ask(argv)
        except (client.NoServer, client.NotDone) as error:
            why = str(error)  # the same work, here and more slowly
    _enter_site()
    from kybernate_shim.actions import run

    return run(argv, without_server=why)


def _ask(argv: list[str]) -> int:
    """Hand the call over. A `start` that finds no fork server leaves one behind; a `delete` is done sooner without."""
    try:
        return client.ask(argv)
    except client.NoServer:
        if argv[-1] != "start":
            raise
    _enter_site()
    from kybernate_shim.fork_server.server import leave

    leave()
    return client.ask(argv)


def _enter_site() -> None:
    """Make installed packages importable, where the interpreter was told not to (by -S, which saves a client time)."""
    if "site" not in sys.modules:
        import site

        site.main()


def launch() -> None:
    """Be the program, as launcher.py writes it, and end at once: taking an interpreter down in order takes its time."""
    status = main()
    sys.stdout.flush()
    posix._exit(status)


if __name__ == "__main__":
    sys.exit(main())
