"""Kinds of errors that a caller can distinguish: each becomes one RPC code.

Modules that are loaded on use derive theirs from these, so that the service need not load them to know them.
"""

from __future__ import annotations


class Missing(Exception):
    """What was named is not there."""


class Damaged(Exception):
    """What was kept is not what it was."""


class Refused(Exception):
    """It cannot be done as things are; nothing was changed, or all of it was undone."""


class Invalid(Exception):
    """The request, the container's configuration or the node's is wrong."""


class Taken(Exception):
    """The id is in use."""


class NoRoom(Exception):
    """There is not enough room for it."""


class Aborted(Exception):
    """It was aborted before it was done; all of it was undone."""


class Cancelled(Exception):
    """A client cancelled it; the message says how things are now."""


class Busy(Exception):
    """Another operation on the same thing is running; nothing was changed."""


class Failed(Exception):
    """A step of it failed; the message says in what state things are."""


class HeldFailed(Failed):
    """What a restore has brought back and holds must not run; the message says why."""


class Stopped(Exception):
    """Work in a thread ended early, because its operation was cancelled or its deadline has passed.

    Only the thread's log shows it: the operation has its own reason by then.
    """
