"""What can be wrong with a store, as a caller can do something about it."""

from __future__ import annotations

from kybernate.node.failure import Failure


class StoreUnreachable(Failure):
    """The object store or its network does not answer. Nothing was lost: what was begun can be tried again."""

    advice = "look at the endpoint, network and credentials, and try again: what is there already is not sent again"


class StoreDenied(Failure):
    """The object store refuses the credentials, or what they may do."""

    advice = "the credentials need to get, put, list and delete below the prefix"


class StoreFull(Failure):
    """There is no room for what was to be written. What had been written before is as it was."""

    advice = "make room (`kybernate store gc`), or raise the quota"


class StoreInconsistent(Failure):
    """The service's answers contradict each other, so that nothing can be concluded from what they lack."""

    advice = "nothing was deleted; look at the service, and at what is between it and this node"


class ObjectMissing(Failure):
    """There is no object of that name."""


class StoreInvalid(Failure):
    """At the place of a store is something that is not one, or one of a newer release, or of another key."""


class ChunkDamaged(Failure):
    """The bytes of a chunk are not those that were stored: its keyed digest differs."""

    advice = "`kybernate store check` lists what is damaged; a restore takes another copy where there is one"


class ImageDamaged(Failure):
    """The files of an image are not those of its signed manifest; of a copy, what had arrived was removed."""

    advice = (
        "delete it, and use another copy of the image or make one where it is whole; "
        "`kybernate inspect --verify` lists what is damaged"
    )


def first_of(error: Exception) -> Exception:
    """Return the error itself, and of those of several requests that ran in parallel, the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
