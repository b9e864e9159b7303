"""What a daemon leaves in a bundle when it has deleted the container: the whole answer to the `delete` that follows.

containerd calls `delete` after each container, and nearly always nothing is left to do. Imports nothing that an
interpreter has not loaded at its start, because that is then all that `delete` costs.
"""

import posix
from _socket import AF_UNIX, SOCK_STREAM, socket

NAME = "deleted"
LARGEST = 1 << 12
MODE = 0o600


def leave_answer(bundle: str, answer: bytes) -> None:
    """Note that the runtime has forgotten the container in `bundle` and that its rootfs is unmounted.

    `answer` is a serialised DeleteResponse. Raises OSError; `delete` then looks for itself.
    """
    fd = posix.open(f"{bundle}/.{NAME}", posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC, MODE)
    try:
        posix.write(fd, answer)
    finally:
        posix.close(fd)
    posix.rename(f"{bundle}/.{NAME}", f"{bundle}/{NAME}")


def left_answer(argv: list[str]) -> bytes | None:
    """Return the answer for the command line of a `delete`, None if anything is left to do, such as a dead socket."""
    try:
        bundle = argv[argv.index("-bundle") + 1]
        answer = _read(f"{bundle}/{NAME}")
        address = _read(f"{bundle}/address").decode()
    except (OSError, ValueError, IndexError):
        return None
    return None if _is_dead(address.removeprefix("unix://")) else answer


def _is_dead(path: str) -> bool:
    """Tell whether there is a socket at `path` that nobody listens on, as a killed daemon leaves it."""
    try:
        posix.stat(path)
    except FileNotFoundError:
        return False
    probe = socket(AF_UNIX, SOCK_STREAM)
    try:
        probe.setblocking(False)
        probe.connect(path)
    except BlockingIOError:
        pass  # so many callers wait that there is somebody
    except OSError:
        return True
    finally:
        probe.close()
    return False


def _read(path: str) -> bytes:
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.read(fd, LARGEST)
    finally:
        posix.close(fd)
