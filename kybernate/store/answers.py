"""What the answer of a service means: its error codes and words as the errors of a store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

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
METADATA: Final = "169.254.169.254"  # where a machine in a cloud asks for its role, and so what is left without a key
VARIABLES: Final = {  # of the credentials, by the scheme of a store's URL
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
ALIASES: Final = {"s3a": "s3", "azure": "az", "abfs": "az", "abfss": "az"}
PROVIDE: Final = (
    "export them for a command; the agent has them from /etc/kybernate/agent.env (mode 0600), not from a shell:"
    " write them there, then `systemctl restart kybernate-agent`"
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
        return StoreUnreachable(f"{title}: the bucket does not exist", advice="create the bucket, or correct the URL")
    if UNKNOWN_KEY in str(error):
        return StoreDenied(f"{title}: {name}: {_short(error)}")
    if isinstance(error, (exceptions.NotFoundError, FileNotFoundError)):
        return ObjectMissing(f"{title}: there is no object {name}")
    if METADATA in str(error):
        return _no_credentials(title, os.environ)
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


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, "" where it is not one."""
    try:
        return urlsplit(url).scheme
    except ValueError:  # such as of "http://["
        return ""


def missing_variables(url: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables with the credentials of a store's service that an environment lacks."""
    scheme = scheme_of(url)
    return tuple(name for name in VARIABLES.get(ALIASES.get(scheme, scheme), ()) if not environment.get(name))


def _no_credentials(title: str, environment: Mapping[str, str]) -> StoreDenied:
    """The client library had no key, and asked the cloud's metadata service in vain."""
    lacking = missing_variables(title, environment)
    if not lacking:
        return StoreDenied(f"{title}: the service of this machine's cloud role does not answer")
    words = " and ".join(lacking)
    verb = "is" if len(lacking) == 1 else "are"
    return StoreDenied(f"{title}: no credentials: {words} {verb} not set, and this machine has no role", advice=PROVIDE)


def _short(error: Exception) -> str:
    """Return the first line, because obstore appends a dump of its error's structure, and the service's own words.

    Where the service answers in XML, these are on the next line.
    """
    line = str(error).partition("\n")[0].partition("<?xml")[0].partition("<Error>")[0].rstrip(": ")
    words = [found[1] for tag in ("Code", "Message") if (found := re.search(f"<{tag}>([^<]*)</{tag}>", str(error)))]
    return ": ".join([line, *words])[:MOST_LETTERS]
