"""What the answer of a service means: its error codes and words as the errors of a store."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kybernate.node.failure import Failure
from kybernate.store.errors import ObjectMissing, StoreDenied, StoreFull, StoreUnreachable


@dataclass(frozen=True)
class Meaning:
    """Marks in the words of services and of Linux, and what they mean."""

    marks: tuple[str, ...]
    error: type[Failure]
    words: str = ""
    advice: str = ""


MEANINGS = (  # the first that fits counts
    Meaning(("No space left", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "507 "), StoreFull),
    Meaning(
        ("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"),
        StoreDenied,
        "the clocks of this node and of the service differ by more than the service accepts",
        "set this node's clock (`timedatectl`), or the service's",
    ),
    Meaning(
        ("ExpiredToken", "TokenExpired", "security token included in the request is expired"),
        StoreDenied,
        "the temporary credentials have expired",
        "provide new ones in the environment and start the agent again",
    ),
    Meaning(
        ("ObjectLocked", "WORM protected", "object lock", "Object Lock"),
        StoreDenied,
        "the bucket's object lock refuses this",
        "the object stays until its retention ends; nothing was lost",
    ),
    Meaning(("AccessDenied", "Access Denied", "InvalidAccessKeyId", "SignatureDoesNotMatch"), StoreDenied),
)
MOST_LETTERS = 1000
MISSING_BUCKET = "NoSuchBucket"
UNKNOWN_KEY = "XAdminUserNotFound"  # of Versity's gateway, with status 404
NO_BULK = ("NotImplemented", "MethodNotAllowed", "UnsupportedOperation", "status code: 405", "status code: 501")
NO_CONDITIONS = ("NotImplemented", "UnsupportedOperation", "not supported", "status code: 501")


def failure_of(title: str, name: str, error: Exception) -> Failure:
    """Return what an error of the client library, or of Linux, means for an object."""
    from obstore import exceptions

    if MISSING_BUCKET in str(error):
        return StoreUnreachable(f"{title}: the bucket does not exist", advice="make the bucket, or correct the URL")
    if UNKNOWN_KEY in str(error):
        return StoreDenied(f"{title}: {name}: {_short(error)}")
    if isinstance(error, (exceptions.NotFoundError, FileNotFoundError)):
        return ObjectMissing(f"{title}: there is no object {name}")
    for meaning in MEANINGS:
        if any(mark in str(error) for mark in meaning.marks):
            return _failure(meaning, title, name, error)
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)):
        return StoreDenied(f"{title}: {name}: {_short(error)}")
    return StoreUnreachable(f"{title}: {name}: {_short(error)}")


def refuses_bulk(error: Exception) -> bool:
    """Return whether a service says that it cannot delete several objects by one request."""
    return any(mark in str(error) for mark in NO_BULK)


def refuses_condition(error: Exception) -> bool:
    """Return whether a service says that it cannot write an object on the condition that there is none."""
    return isinstance(error, NotImplementedError) or any(mark in str(error) for mark in NO_CONDITIONS)


def _failure(meaning: Meaning, title: str, name: str, error: Exception) -> Failure:
    if meaning.error is StoreFull:
        return StoreFull(f"{title}: no room for {name}: {_short(error)}")
    words = f"{meaning.words}: " if meaning.words else ""
    return meaning.error(f"{title}: {name}: {words}{_short(error)}", advice=meaning.advice or meaning.error.advice)


def _short(error: Exception) -> str:
    """Return the first line, because obstore appends a dump of its error's structure, and the service's own words.

    Where the service answers in XML, these are on the next line.
    """
    line = str(error).partition("\n")[0].partition("<?xml")[0].partition("<Error>")[0].rstrip(": ")
    words = [found[1] for tag in ("Code", "Message") if (found := re.search(f"<{tag}>([^<]*)</{tag}>", str(error)))]
    return ": ".join([line, *words])[:MOST_LETTERS]
