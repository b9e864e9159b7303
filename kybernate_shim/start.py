"""`start`: leave one daemon per pod behind and give containerd the address of its socket.

stdout and stderr are one pipe here, and containerd reads it to its end: nothing but the answer may be printed, and
nothing that lives on may hold it open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from kybernate_shim.address import answers, exclusive, group_of, listen, socket_path
from kybernate_shim.bootstrap import answer, protocol_of
from kybernate_shim.invocation import Invocation
from kybernate_shim.linux.atomic_write import replace_file

OWN_FD_LIMIT = 3  # 0, 1 and 2 stay open in the daemon, on /dev/null


def start(invocation: Invocation) -> int:
    """Answer with the address of the pod's daemon, started now unless another container of the pod did before."""
    protocol = cache(lambda: protocol_of(os.getppid(), invocation.publish_binary))
    try:
        path, listener = claim(invocation)
        if listener is not None:
            try:
                _leave_daemon(invocation, listener, path, meanwhile=protocol)
            except BaseException:
                path.unlink(missing_ok=True)  # still ours: the socket has been listening all the time
                raise
    except (OSError, ValueError) as error:
        sys.stderr.write(failure(invocation, str(error)))
        return 1
    sys.stdout.write(answer(path, protocol()))
    return 0


def failure(invocation: Invocation, reason: str) -> str:
    """Return what containerd is to read when `start` fails."""
    return f"containerd-shim-kybernate-v1: cannot start the shim of {invocation.id}: {reason}\n"


def existing(invocation: Invocation) -> Path | None:
    """Return the address of the pod's daemon, in the bundle, too, if another container has one. Raises as `claim`."""
    path = _daemons_path(invocation)
    if not answers(path):
        return None
    _write_address(f"unix://{path}")
    return path


def claim(invocation: Invocation) -> tuple[Path, socket.socket | None]:
    """Return the pod's address and a socket that listens there, None when another container's daemon does already.

    The address is in the bundle afterwards. Raises OSError, and ValueError for a config.json that is none.
    """
    path = _daemons_path(invocation)
    _write_address(f"unix://{path}")  # before anything lives that a full disk would leave behind
    with exclusive(path.parent):
        return path, listen(path)


def _daemons_path(invocation: Invocation) -> Path:
    """Return where the pod's daemon listens, or would: config.json, in this directory, says which pod that is."""
    return socket_path(invocation.address, invocation.namespace, group_of(Path("config.json"), invocation.id))


def serve_from_here(
    invocation: Invocation, listener: socket.socket, path: Path, *, containerd: int, ready: Callable[[], None]
) -> int:
    """Be the daemon, in a process that was forked for it and that keeps no descriptor but `listener` and those above.

    `containerd` is the pid of the process that executed the binary. Returns the exit status, once the daemon has ended.
    Raises what prevented its start, with the address free again.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)

        def announce() -> None:
            ready()
            undo.pop_all()  # from now on the daemon takes its address away itself, once

        if options := _read_options():
            _place_in_cgroup(options, os.getpid())
        _set_core_scheduling()
        _detach(containerd)
        from kybernate_shim import serve  # here, because the pod's second container needs none of it

        return serve.serve(invocation, listener, path, ready=announce)


def _leave_daemon(
    invocation: Invocation, listener: socket.socket, path: Path, *, meanwhile: Callable[[], object]
) -> None:
    """Fork the daemon and return when it serves; raise ChildProcessError with its words when it does not.

    `meanwhile` is done while the daemon imports its modules, which takes it a tenth of a second.
    """
    _set_core_scheduling()
    options = _read_options()
    said, say = os.pipe()
    containerd = os.getppid()
    pid = os.fork()
    if pid == 0:
        _become_daemon(invocation, listener, path, say, containerd)
    os.close(say)
    try:
        if options:
            _place_in_cgroup(options, pid)
        meanwhile()
        with os.fdopen(said, "rb") as stream:
            words = stream.read()
    except BaseException:
        os.kill(pid, 9)
        raise
    if words != b"ready":
        raise ChildProcessError(words.decode(errors="replace") or "the daemon ended without a message")


def _become_daemon(invocation: Invocation, listener: socket.socket, path: Path, say: int, containerd: int) -> None:
    """Turn this forked process into the daemon. Never returns, whatever happens: the parent's stack is not ours."""
    status = 1
    try:
        keep_only(listener.fileno(), say)
        _detach(containerd)
        from kybernate_shim import serve  # here, because the pod's second container needs none of it

        status = serve.serve(invocation, listener, path, ready=lambda: _say(say, b"ready"))
    except BaseException as error:  # noqa: BLE001  # a daemon that cannot start must say so to its launcher
        _say(say, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(status)


def _detach(containerd: int) -> None:
    """Leave the session, the standard descriptors and the OOM score of the process that started us."""
    os.setsid()
    set_oom_score(containerd)
    use_nothing()


def _read_options() -> bytes:
    """Return what containerd has written to our standard input."""
    return b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()


def _say(fd: int, words: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, words)
        os.close(fd)


def keep_only(*fds: int) -> None:
    """Close every inherited descriptor but these and 0 to 2: containerd's pipe among them."""
    low = OWN_FD_LIMIT
    for fd in sorted(fds):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def use_nothing() -> None:
    """Put /dev/null in the place of the standard descriptors."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def set_oom_score(containerd: int) -> None:
    """Be killed a little sooner than containerd; its own children inherit this until the runtime sets theirs."""
    try:
        score = int(Path(f"/proc/{containerd}/oom_score_adj").read_text())
        Path("/proc/self/oom_score_adj").write_text(str(min(score + 1, 1000)))
    except (OSError, ValueError):
        pass  # a user namespace may forbid it, and containerd may be gone


def _set_core_scheduling() -> None:
    if os.environ.get("SCHED_CORE"):
        from kybernate_shim.linux.prctl import new_core_scheduling_cookie

        new_core_scheduling_cookie()


def _place_in_cgroup(options: bytes, pid: int) -> None:
    from kybernate_shim.linux.cgroup.cgroup import join_shim_cgroup
    from kybernate_shim.oci.options import decode_options, decode_start_input

    if cgroup := decode_options(decode_start_input(options)).shim_cgroup:
        join_shim_cgroup(cgroup, pid)


def _write_address(address: str) -> None:
    """Write the file from which containerd 1.7 finds the daemon again after its own restart."""
    replace_file(Path("address"), address)
