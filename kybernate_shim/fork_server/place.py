"""Where the fork server of this installation listens.

The name is made of what the installation is, not of what it says of itself: after an upgrade, with another interpreter
or in another mount namespace there is another name, and a client cannot even find the wrong server.
Imports nothing that an interpreter has not loaded at its start, for every `start` and `delete` passes here.
"""

import posix
import sys

DIRECTORY = "/run/kybernate/fork-server"


def socket_path() -> str:
    """Return the address of the server that was made from the same files as this process."""
    package = __file__.rpartition("/fork_server/")[0]
    facts = (
        *_identity(posix.stat(f"{package}/__init__.py")),
        *_identity(posix.stat(f"{package}/.."), of_content=True),  # where dependencies come and go with their versions
        *_identity(posix.stat(sys.executable)),
        posix.stat("/proc/self/ns/mnt").st_ino,
        sys.hexversion,
    )
    return f"{DIRECTORY}/{hash(facts) & (1 << 64) - 1:016x}"  # the hash of numbers is the same in every process


def _identity(status: posix.stat_result, *, of_content: bool = False) -> tuple[int, int, int]:
    """Return what no two files share, even if one takes the other's place; of a directory, the entries' time.

    A file's status changes with its replacement, whatever time an archive gives to its content.
    """
    return status.st_dev, status.st_ino, status.st_mtime_ns if of_content else status.st_ctime_ns
