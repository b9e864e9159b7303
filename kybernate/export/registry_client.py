"""A client of the OCI distribution protocol, for one repository: manifests, blobs, uploads, ranges.

It is our own, because the known library for Python uploads and downloads whole files: it needs room on the disk for
each layer twice, asks for no range, and starts again from nothing when a connection is lost.
Source: OCI distribution specification 1.1; RFC 9110 for ranges.
"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.request import getproxies

import httpx

from kybernate.export.answers import document_of
from kybernate.export.challenge import RegistryAuth
from kybernate.export.credentials import Credentials
from kybernate.export.documents import DIGEST, INDEX, MANIFEST, MOST_DOCUMENT, ArtefactInvalid, Descriptor
from kybernate.export.guard import ANSWER_SECONDS, CONTENT, Guard
from kybernate.export.reference import Reference
from kybernate.node.failure import Failure, Unavailable

ATTEMPTS = 6
FIRST_ATTEMPTS = 3  # before a registry has answered at all: its name may be wrong
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts
AGAIN = {408, 425, 429, 500, 502, 503, 504}
ACCEPT = ", ".join(
    (MANIFEST, INDEX, "application/vnd.docker.distribution.manifest.v2+json")
)  # the last is refused later, with better words than a registry's
LEAST_RATE = 1024  # bytes a second of a body, on the average from its first minute on
TIMEOUT = httpx.Timeout(60, connect=20)  # seconds without a byte


class Stopped(Exception):
    """Another thread has failed, or the user has pressed Ctrl-C."""


@dataclass(frozen=True)
class Connection:
    """How to reach a registry. `ca` is a file of certificates that are trusted in place of the system's."""

    credentials: Credentials = field(default_factory=Credentials)
    plain_http: bool = False
    ca: Path | None = None
    mount_from: str = ""  # a repository of the same registry that may have equal blobs
    parallel: int = 4


class ImageRegistryClient:
    """The repository of a reference. Its methods are used by several threads. `stop` ends all of them."""

    def __init__(self, reference: Reference, how: Connection, *, push: bool = False) -> None:
        scheme = "http" if how.plain_http or (reference.is_local and how.ca is None) else "https"
        self.reference, self.how = reference, how
        self._origin = httpx.URL(f"{scheme}://{reference.host}")
        self._base = f"{self._origin}/v2/{reference.repository}"
        self._stopped = self._answered = False
        scopes = [f"repository:{reference.repository}:{'pull,push' if push else 'pull'}"]
        if how.mount_from:
            scopes.append(f"repository:{how.mount_from}:pull")
        guard = Guard(self._origin, proxied=bool(getproxies()))
        self._http = httpx.Client(
            auth=RegistryAuth(self._origin, how.credentials, tuple(scopes)),
            verify=_trust(how.ca),
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=how.parallel * 2 + 2),
            headers={"User-Agent": "kybernate", "Accept-Encoding": "identity"},
            event_hooks={"request": [guard.before], "response": [guard.after]},
        )

    def close(self) -> None:
        self._http.close()

    def stop(self) -> None:
        """End what other threads do, at their next step."""
        self._stopped = True

    def require_running(self) -> None:
        """Raise Stopped where `stop` was called."""
        if self._stopped:
            raise Stopped

    # -- manifests

    def manifest(self, target: str) -> tuple[bytes, str]:
        """Return a manifest or an index by tag or digest, and its digest. Raises Failure."""
        with self.streamed("GET", f"{self._base}/manifests/{target}", headers={"Accept": ACCEPT}) as response:
            self.require(response, {200}, f"{self.reference} cannot be pulled")
            content = self._document(response)
        digest = f"sha256:{sha256(content).hexdigest()}"
        if DIGEST.fullmatch(target) and target != digest:
            raise ArtefactInvalid(f"manifest {target} was changed: its digest is {digest}")
        return content, digest

    def _document(self, response: httpx.Response) -> bytes:
        """Return the body of a manifest, as it is: none was asked to be compressed. Raises ArtefactInvalid."""
        if encoding := response.headers.get("content-encoding", "identity").strip().lower().removeprefix("identity"):
            raise ArtefactInvalid(f"{self.reference.host} gives a compressed manifest ({encoding[:60]!a})")
        content = bytearray()
        for piece in self.pieces(response):
            content += piece
            if len(content) > MOST_DOCUMENT:
                raise ArtefactInvalid(f"a manifest of more than {MOST_DOCUMENT} bytes")
        return bytes(content)

    def put_manifest(self, content: bytes, media_type: str, target: str) -> None:
        """Make a manifest known by a tag or a digest. Raises Failure."""
        url, headers = f"{self._base}/manifests/{target}", {"Content-Type": media_type}
        response = self.call("PUT", url, content=content, headers=headers)
        self.require(response, {201, 200}, f"{self.reference} cannot be pushed")

    # -- blobs

    def has_blob(self, descriptor: Descriptor) -> bool:
        """Return whether the repository has a blob."""
        response = self.call("HEAD", f"{self._base}/blobs/{descriptor.digest}", follow_redirects=True)
        if response.status_code == 404:
            return False
        self.require(response, {200}, f"blob {descriptor.digest} cannot be looked up")
        return True

    def blob_url(self, descriptor: Descriptor) -> str:
        """Return where a blob is read."""
        return f"{self._base}/blobs/{descriptor.digest}"

    def begin_upload(self, descriptor: Descriptor) -> httpx.URL | None:
        """Return where a blob is to be sent, None where the registry has mounted it. Raises Failure."""
        query = {"mount": descriptor.digest, "from": self.how.mount_from} if self.how.mount_from else {}
        response = self.call("POST", f"{self._base}/blobs/uploads/", params=query)
        self.require(response, {201, 202}, f"{self.reference} cannot be pushed")
        return None if response.status_code == 201 and query else self.location(response)

    def location(self, response: httpx.Response) -> httpx.URL:
        """Return the absolute address that a response names for an upload."""
        found = response.headers.get("location", "")
        if not found:
            raise Unavailable(f"{self.reference.host} names no place for an upload")
        try:
            place = response.request.url.join(found)
        except httpx.InvalidURL as error:
            raise Failure(f"{self.reference.host} names {found[:400]!a} for an upload") from error
        self._require_secure(place)
        return place

    # -- requests

    def call(self, method: str, url: str | httpx.URL, **options: Any) -> httpx.Response:
        """Do a request, again where it may help; its body is bytes. Raises Unavailable."""
        return self.attempts(lambda: self._http.request(method, url, **options))

    def once(
        self, method: str, url: httpx.URL, content: bytes | Iterator[bytes], headers: Mapping[str, str]
    ) -> httpx.Response:
        """Do a request once. Raises httpx.TransportError."""
        return self._http.request(method, url, content=content, headers=headers)

    def forget(self, place: httpx.URL) -> None:
        """Give up an upload, whatever was stopped. Raises httpx.TransportError."""
        self._http.request("DELETE", place, timeout=5)

    def attempts(self, do: Callable[[], httpx.Response]) -> httpx.Response:
        """Return the answer of a request, after a few attempts. Raises Unavailable and Failure."""
        for attempt in range(ATTEMPTS):
            self.require_running()
            try:
                response = do()
                self._answered = True
                if response.status_code not in AGAIN or attempt == ATTEMPTS - 1:
                    return response
                response.close()  # one whose body is streamed would keep its connection
                self.pause(attempt, response.headers.get("retry-after", ""))
            except httpx.TransportError as error:
                self.failed(error, attempt)
            except (httpx.RequestError, httpx.InvalidURL) as error:  # redirects without end, an address that is none
                raise Failure(f"{self.reference.host} gives nothing that can be used: {error}") from error
        raise AssertionError("the last attempt returns or raises")

    def failed(self, error: httpx.TransportError, attempt: int) -> None:
        """Wait after an attempt that failed. Raises Unavailable after the last one."""
        last = (ATTEMPTS if self._answered else FIRST_ATTEMPTS) - 1
        if attempt >= last or "SSL" in str(error):
            raise Unavailable(
                f"{self.reference.host} cannot be reached: {error}",
                advice="--plain-http is for a registry without TLS, --ca names the certificate of its authority",
            ) from error
        self.pause(attempt)

    def pause(self, attempt: int, retry_after: str = "") -> None:
        """Wait before the next attempt; a registry may say how long."""
        seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1)
        if retry_after.isascii() and retry_after.isdigit():
            seconds = min(LONGEST_PAUSE, float(retry_after[:6]))
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.require_running()
            time.sleep(min(left, 0.2))

    @contextmanager
    def streamed(self, method: str, url: str, **options: Any) -> Iterator[httpx.Response]:
        """Give the response to a request whose body is read within the block, redirects followed."""
        request = self._http.build_request(method, url, extensions={CONTENT: True}, **options)
        response = self.attempts(lambda: self._http.send(request, stream=True, follow_redirects=True))
        try:
            self._require_secure(response.url)
            yield response
        except httpx.TransportError as error:
            raise Unavailable(f"{self.reference.host} broke off: {error}") from error
        except httpx.RequestError as error:
            raise Failure(f"{self.reference.host} gives nothing that can be used: {error}") from error
        finally:
            response.close()

    def pieces(self, response: httpx.Response) -> Iterator[bytes]:
        """Yield the bytes of a body as they come; a thread that reads them ends when `stop` was called.

        A registry that gives a byte a minute would keep its reader without end. Raises Unavailable.
        """
        begin, done = time.monotonic(), 0
        for piece in response.iter_raw():
            self.require_running()
            done += len(piece)
            seconds = time.monotonic() - begin
            if seconds > ANSWER_SECONDS and done < seconds * LEAST_RATE:
                raise Unavailable(f"{self.reference.host} has given {done} bytes in {seconds:.0f} s")
            yield piece

    def _require_secure(self, url: httpx.URL) -> None:
        """Refuse an address without TLS that a registry with TLS names: an image holds the memory of its processes."""
        if self._origin.scheme == "https" and url.scheme != "https":
            raise Failure(f"{self.reference.host} names {url.host} without TLS for a blob")

    def require(self, response: httpx.Response, expected: set[int], what: str) -> None:
        """Raise Failure unless the status is an expected one."""
        if response.status_code not in expected:
            raise refusal(response, what)


def refusal(response: httpx.Response, what: str) -> Failure:
    """Return what a response says, in the registry's own words where it has some."""
    status = response.status_code
    advice = ""
    if status in (401, 403):
        advice = "`docker login` writes credentials; --credentials names another file"
    return Failure(f"{what}: {_said(response)}", advice=advice)


def _said(response: httpx.Response) -> str:
    words = f"HTTP {response.status_code} from {response.request.url.host}"
    try:
        errors = document_of(response)["errors"]
        said = "; ".join(f"{one.get('code', '')} {one.get('message', '')}".strip() for one in errors[:3])
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return words
    return f"{words}: {said[:400]}" if said else words


def _trust(ca: Path | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise Unavailable(f"{ca} has no certificates that can be read: {error}") from error
