"""The fork server: an interpreter that has imported all a shim needs, and forks one process per call of the binary.

It does nothing else: the forked process waits for its client, ahead of time, and reads the call, because a server that
waits for one client would let the others wait, too. It has no threads, keeps no descriptor of a pod, and ends when no
client has come for some time, or when its socket's file is gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kybernate_shim import tuning
from kybernate_shim.address import answers, exclusive, listen
from kybernate_shim.fork_server import place
from kybernate_shim.fork_server.place import PROGRAM
from kybernate_shim.imports import OPENSSL, postpone, without
from kybernate_shim.linux.inotify import inotify_watch

if TYPE_CHECKING:
    from kybernate_shim.fork_server.process_context import ProcessContext  # loaded only once it is the server's turn

PROCESS_NAME = "kybernate-fork"  # the kernel keeps 15 bytes
COMMAND_LINE = [PROGRAM, "fork-server"]
BACKLOG = 1024
SCARCITY_SECONDS = 0.1
CLONING = ("runc", "crun")  # that would make a copy of themselves for each container
QUIET_SECONDS = 0.5  # in which the CPUs are left to the node's first container
INOTIFY_BYTES = 4096
WARM_UPS = 10  # an interpreter adapts code to its data after a few runs, and would do it in every daemon
# What asyncio, protobuf, subprocess, ctypes and, for tracebacks, the library import for what no daemon does.
UNUSED = (
    "asyncio.sslproto", "asyncio.staggered", "calendar", "google.protobuf.descriptor_database",
    "google.protobuf.text_encoding", "locale", "sysconfig", "_colorize", "textwrap", "tokenize",
)  # fmt: skip
IN_ATTRIB, IN_MOVE_SELF = 0x4, 0x800
TAKEN_OVER = b"taken over"
IDLE, UNREACHABLE, REPLACED = "idle", "unreachable", "replaced"


def leave() -> None:
    """Return when a fork server listens, which is started unless there is one, or when none can.

    It has not imported anything then: clients that connect wait for that. So do all that start concurrently on a cold
    node, instead of each importing separately. Garbage is not collected until the imports are done, since nearly all
    objects stay.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        gc.disable()
        _become_server(writing)
    os.close(writing)
    if os.fork() == 0:
        _ask_ahead(os.getppid())
    with os.fdopen(reading, "rb") as pipe:
        pipe.read()  # until it listens or has ended


def _ask_ahead(launcher: int) -> NoReturn:
    """Find out containerd's version before the first daemon is requested, while the server imports.

    `launcher` is the process that the client of containerd's has started for the server. Never returns.
    """
    try:
        from kybernate_shim.actions import required
        from kybernate_shim.bootstrap import protocol_of
        from kybernate_shim.linux.process import parent_of
        from kybernate_shim.start import use_nothing

        use_nothing()  # containerd reads its pipe to the end
        client = parent_of(launcher)
        words = Path(f"/proc/{client}/cmdline").read_bytes().split(b"\0")[1:-1]
        protocol_of(parent_of(client), required([os.fsdecode(word) for word in words]).publish_binary)
    finally:
        os._exit(0)  # whatever failed, the daemon's process queries it again


def _become_server(writing: int) -> NoReturn:
    """Turn this forked process into the server. Never returns: the parent's stack is not ours."""
    status = 1
    try:
        os.setsid()
        idle = _idle_seconds()
        if not _tuned():
            tuning.switch_off()
        path = Path(place.socket_path())
        with exclusive(path.parent):
            listener = listen(path, socket.SOCK_SEQPACKET) if idle else None
            _sweep(path.parent)
        if listener is not None:
            listener.listen(BACKLOG)
            listener.setblocking(False)
            _let_go(listener, writing)
            ForkServer(listener, path, idle).run()
        status = 0
    finally:
        os._exit(status)


def _sweep(directory: Path) -> None:
    """Remove what killed servers have left, such as those of earlier versions."""
    for path in directory.iterdir():
        if not answers(path, socket.SOCK_SEQPACKET):
            path.unlink(missing_ok=True)


def _let_go(listener: socket.socket, writing: int) -> None:
    """Keep nothing of the process that we were forked from, and let it continue."""
    from kybernate_shim.linux.prctl import set_command_line, set_process_name
    from kybernate_shim.start import keep_only, set_oom_score, use_nothing

    set_oom_score(os.getppid())
    os.chdir("/")
    use_nothing()
    set_process_name(PROCESS_NAME)
    with contextlib.suppress(OSError):
        set_command_line(COMMAND_LINE)
    os.close(writing)
    keep_only(listener.fileno())


class ForkServer:
    """Waits for clients on `listener`, whose file is `path`, and ends after `idle` seconds without one."""

    def __init__(self, listener: socket.socket, path: Path, idle: float) -> None:
        self._listener = listener
        self._path = path
        self._idle = idle
        self._file = _inode(path)
        self._let_go: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Serve until no client comes any more, or none can.

        In parallel, a successor does the preparations that would have delayed clients, and takes over.
        """
        import_first()
        context = _nature()
        gc.freeze()
        gc.enable()
        if self._serve(context, self._idle, self._raise_successor(context)) == IDLE:
            self._leave_address()

    def _raise_successor(self, context: ProcessContext) -> int | None:
        """Fork a better server, and return the descriptor that reports its takeover. In the successor, return None."""
        reading, writing = os.pipe()
        if not _forked():
            os.close(writing)
            return reading
        os.close(reading)
        os.setsid()
        time.sleep(QUIET_SECONDS)
        prepare(context)
        from kybernate_shim.linux.file_pages import let_go  # it needs ctypes, for which no client should wait

        self._let_go = let_go
        self._listener.listen(BACKLOG)  # from here on, clients see our credentials: listen(2) sets them
        os.write(writing, TAKEN_OVER)
        os.close(writing)
        return None

    def _serve(self, context: ProcessContext, pause: float, successor: int | None = None) -> str:
        """Serve clients until none has come for `pause` seconds, or none can any more; return what ended it."""
        if not self._reachable():
            return UNREACHABLE
        events = select.poll()
        # A listening socket keeps its inode: the removal of its file shows as a change of the count of links.
        try:
            watch = inotify_watch(str(self._path), IN_ATTRIB | IN_MOVE_SELF)
        except OSError:  # programs of the same user, such as root's in containers, have taken all of its instances
            watch = os.eventfd(0)  # which never becomes readable
        for fd in (watch, *([successor] if successor is not None else [])):
            events.register(fd, select.POLLIN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        spare = self._fork_spare(context)
        events.register(spare, select.POLLIN)
        try:
            while found := dict(events.poll(pause * 1000)):
                if watch in found and os.read(watch, INOTIFY_BYTES) and not self._reachable():
                    return UNREACHABLE
                if successor is not None and successor in found:
                    if os.read(successor, len(TAKEN_OVER)):
                        return REPLACED
                    events.unregister(successor)  # it died, and we continue
                if spare.fileno() in found:
                    events.unregister(spare)
                    spare.close()
                    spare = self._fork_spare(context)
                    events.register(spare, select.POLLIN)
            return IDLE
        finally:
            spare.close()
            os.close(watch)

    def _fork_spare(self, context: ProcessContext) -> socket.socket:
        """Fork the process for the next client in advance, and return what becomes readable when that client has come.

        The process ends if the returned socket is closed before. Without processes or memory, this tries again and
        again.
        """
        ours, theirs = socket.socketpair()
        while (child := _forked()) is None:
            time.sleep(SCARCITY_SECONDS)
        self._let_go()
        if child:
            ours.close()
            wait_and_answer(self._listener, theirs, context)
        theirs.close()
        return ours

    def _reachable(self) -> bool:
        return _inode(self._path) == self._file

    def _leave_address(self) -> None:
        with exclusive(self._path.parent):
            if self._reachable():
                self._path.unlink()


def wait_and_answer(listener: socket.socket, server: socket.socket, context: ProcessContext) -> NoReturn:
    """Serve one client in this forked process, whose parent's stack is not ours, unless the server ends before."""
    status = 1
    try:
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        from kybernate_shim.fork_server.answer import answer
        from kybernate_shim.linux.socket_peer import peer_of

        connection = _next_client(listener, server)
        if connection is not None and peer_of(connection).uid == os.geteuid():
            status = answer(connection, context)
    finally:
        os._exit(status)


def _next_client(listener: socket.socket, server: socket.socket) -> socket.socket | None:
    """Wait for a client, and report to the server that it has come; None when the server has ended."""
    events = select.poll()
    events.register(listener, select.POLLIN)
    events.register(server, select.POLLIN)
    while server.fileno() not in dict(events.poll()):
        try:
            connection, _ = listener.accept()
        except OSError:
            continue  # the other server's process was faster, while one succeeds the other
        server.close()
        listener.close()
        return connection
    return None


def import_first() -> None:
    """Import what every container needs, except OpenSSL, and what is imported only in case something uses it."""
    for name in UNUSED:
        postpone(name)
    with without(*OPENSSL):
        import hashlib

        import kybernate_shim.fork_server.answer
        import kybernate_shim.serve  # noqa: F401
    if not hasattr(hashlib, "sha256"):  # a distribution's interpreter may have it from OpenSSL alone
        importlib.reload(hashlib)


def prepare(context: ProcessContext) -> None:
    """Do once, for all processes that will be forked, what each of them would do again; `context` is ours."""
    import kybernate_shim.delete  # noqa: F401
    from kybernate_shim.fork_server.process_context import adopt_context
    from kybernate_shim.fork_server.shared_pages import fix_constants, keep_shared
    from kybernate_shim.imports import import_rest
    from kybernate_shim.linux.file_pages import let_go
    from kybernate_shim.linux.libc import use_one_heap
    from kybernate_shim.linux.prctl import set_command_line

    use_one_heap()
    import_rest()
    if tuning.is_on():
        fix_constants()
    for _ in range(WARM_UPS):
        adopt_context(os.getpid(), context)
        with contextlib.suppress(OSError):
            set_command_line(COMMAND_LINE)
    _seal_runtime()
    let_go()  # before any fork: each child would have to look for them again
    _rehearse()
    if tuning.is_on():
        keep_shared()


def _rehearse() -> None:
    """Rehearse a daemon's life. Where that fails, daemons work as without it, and the failure is logged."""
    from kybernate_shim.fork_server import warm_up

    try:
        warm_up.warm_up(WARM_UPS)
    except Exception as error:  # a defect must not take the server away from a node
        from kybernate_shim.logs import open_log

        file = Path(f"{place.DIRECTORY}.log")
        log = open_log(file.with_name("none"), file, level="warning", pid=os.getpid())
        log.warning("warm_up.failed", error=f"{type(error).__name__}: {error}", exc_info=True)


def _seal_runtime() -> None:
    """Keep the node's runtime in memory, unless it differs between containers, or the settings forbid it."""
    from kybernate_shim.config import Config, ConfigInvalid
    from kybernate_shim.errors import Missing
    from kybernate_shim.linux.sealed_program import seal
    from kybernate_shim.oci.options import RuntimeOptions
    from kybernate_shim.oci.select import choose_runtime
    from kybernate_shim.oci.spec import Spec

    with contextlib.suppress(ConfigInvalid, Missing, OSError):
        config = Config.load()
        runtime = choose_runtime(os.environ, RuntimeOptions(), config, Spec({}))
        if config.runtime_in_memory and runtime.name in CLONING:
            seal(runtime)


def _nature() -> ProcessContext:
    from kybernate_shim.fork_server.process_context import ProcessContext

    return ProcessContext.of("self")


def _idle_seconds() -> float:
    """Return the node's setting; each Create reports a file that cannot be used, so here the default suffices."""
    from kybernate_shim.config import Config, ConfigInvalid

    try:
        return Config.load().fork_server_idle
    except ConfigInvalid:
        return Config().fork_server_idle


def _tuned() -> bool:
    """Return the node's setting, or the default where its file cannot be used."""
    from kybernate_shim.config import Config, ConfigInvalid

    try:
        return Config.load().fork_server_tuning
    except ConfigInvalid:
        return Config().fork_server_tuning


def _forked() -> bool | None:
    """Fork; return True in the child and False in its parent. None where the machine is out of processes or memory."""
    try:
        return os.fork() == 0
    except OSError:
        return None


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
