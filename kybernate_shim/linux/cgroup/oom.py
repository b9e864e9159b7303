"""Notices that the kernel has killed a process of a container because memory ran out.

A descriptor for an event loop, and the kernel's own count, which shows whether an event is a kill. Sources: inotify(7);
"Control Group v2", memory.events; "Memory Resource Controller" (version 1), section 9 and 10.
"""

from __future__ import annotations

import errno
import os
import select

from kybernate_shim.linux import inotify, timerfd
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.cgroup.files import Directory

# Version 1 gives notice before it chooses and kills: the count grows a moment later, or never, if the limit that was
# reached is that of a parent and the victim is elsewhere.
LOOK_AGAIN_SECONDS = (0.001, 0.01, 0.1, 1.0)


def oom_kills(cgroup: Cgroup) -> int:
    """Return how many processes of the cgroup were OOM-killed; 0 when it is gone or the kernel keeps no count."""
    file = "memory.oom_control" if cgroup.version == 1 else "memory.events"
    try:
        with Directory(cgroup.path("memory")) as directory:
            return directory.table(file).get("oom_kill", 0)
    except FileNotFoundError:
        return 0


class OomWatch:
    """Watches one cgroup from its creation to close().

    Raises FileNotFoundError when the cgroup is gone or has no memory controller.
    """

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self._seen = oom_kills(cgroup)
        self._looks: list[float] = []
        self._notice = _notice_of_events(cgroup) if cgroup.version == 2 else _notice_of_pressure(cgroup)
        self._timer = timerfd.timer_open()
        self._epoll = select.epoll()
        for fd in (self._notice, self._timer):
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when read() should be called."""
        return self._epoll.fileno()

    def read(self) -> bool:
        """Return whether a process was killed since the last call. May be called at any time; never blocks."""
        noticed = _drain(self._notice)
        _drain(self._timer)
        if noticed and self._cgroup.version == 1:
            self._looks = list(LOOK_AGAIN_SECONDS)
        kills = oom_kills(self._cgroup)
        killed = kills > self._seen
        self._seen = max(kills, self._seen)
        if killed:
            self._looks = []
        timerfd.timer_set(self._timer, self._looks.pop(0) if self._looks else 0)
        return killed

    def close(self) -> None:
        self._epoll.close()
        os.close(self._timer)
        os.close(self._notice)


def _notice_of_events(cgroup: Cgroup) -> int:
    """Return an inotify descriptor; where containers of the same user have taken all instances, one without notices.

    A kill is then seen at the container's exit, where it is looked for in any case.
    """
    try:
        return inotify.inotify_watch(str(cgroup.path("memory") / "memory.events"), inotify.IN_MODIFY)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENOSPC, errno.ENOMEM):
            raise
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _notice_of_pressure(cgroup: Cgroup) -> int:
    """Return an eventfd that the kernel counts up at every shortage of memory and at the cgroup's end."""
    path = cgroup.path("memory")
    notice = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        control = os.open(path / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        try:
            register = os.open(path / "cgroup.event_control", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(register, f"{notice} {control}".encode())
            finally:
                os.close(register)
        finally:
            os.close(control)
    except BaseException:
        os.close(notice)
        raise
    return notice


def _drain(fd: int) -> bool:
    """Read what is there. Returns whether there was anything."""
    try:
        return bool(os.read(fd, 4096))
    except BlockingIOError:
        return False
