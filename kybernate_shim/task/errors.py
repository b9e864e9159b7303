"""Why a call on a process of a container was refused."""

from __future__ import annotations


class ExecNotFound(Exception):
    """No exec of that id in this container."""


class ExecExists(Exception):
    """The exec id is in use."""


class InitGone(Exception):
    """The container's init has ended, so nothing can be started in it any more."""


class NotStarted(Exception):
    """The exec has not been started yet, so it cannot be signalled."""
