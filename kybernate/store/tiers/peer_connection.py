"""One connection to another agent's TLS port, for ranges of files by HTTP/1.1. Its calls block."""

from __future__ import annotations

import http.client
import socket
import ssl
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Final

from kybernate.client.contexts import Tls
from kybernate.client.target import Endpoint
from kybernate.node.failure import Failure

SECONDS: Final = 30.0  # without a byte
CONNECT_SECONDS: Final = 10.0


class PartNotRead(Exception):
    """The connection broke, or the agent cannot answer now: another attempt may succeed. The message says why."""


class ImageClosed(Exception):
    """The image is not open under this token any more."""


class PeerFailed(Failure):
    """Another node's agent cannot give the image: it does not answer, it refuses, or what it gives is not accepted.

    What has arrived stays for the next attempt; another source may do better.
    """


PEER_REFUSED_ADVICE: Final = "its log says why; `kybernate images` there shows the image"


class PeerConnection:
    """Connects when it is first used, and again after a failure."""

    def __init__(self, target: Endpoint) -> None:
        if target.tls is None:
            raise ValueError(f"{target.address}: images are read over TLS")
        host, _, port = target.address.rpartition(":")
        self._tls, self._title = target.tls, target.address
        self._host, self._port = host.strip("[]"), int(port)
        self._connection: http.client.HTTPConnection | None = None
        self._buffer = bytearray()
        self._aborted = False

    def read(self, token: str, number: int, offset: int, size: int) -> memoryview:
        """Return bytes of a file, valid until the next call. Raises PartNotRead, ImageClosed and PeerFailed."""
        try:
            return self._read(token, number, offset, size)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise PeerFailed(
                f"{self._title} has shown a certificate that is not valid: {error}", advice=PEER_REFUSED_ADVICE
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise PartNotRead(f"{self._title}: {error or type(error).__name__}") from error
        except BaseException:
            self.close()
            raise

    def abort(self) -> None:
        """Do as `drop`, and let no other connection be made."""
        self._aborted = True
        self.drop()

    def drop(self) -> None:
        """End the connection that is in use, so that a thread in `read` returns."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            try:
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)  # ssl's own would forget the encryption
            except OSError:
                pass  # it has ended already

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self, token: str, number: int, offset: int, size: int) -> memoryview:
        connection = self._connected()
        connection.request("GET", f"/images/{token}/{number}", headers={"Range": f"bytes={offset}-{offset + size - 1}"})
        answer = connection.getresponse()
        if answer.status == HTTPStatus.PARTIAL_CONTENT and answer.length == size:
            return self._content(answer, size)
        if answer.status == HTTPStatus.PARTIAL_CONTENT and answer.length is None:
            raise PartNotRead(f"{self._title}: the connection ended in the head of an answer")
        if answer.status == HTTPStatus.GONE:
            raise ImageClosed
        why = answer.read(1000).decode(errors="replace") if answer.status >= HTTPStatus.BAD_REQUEST else ""
        raise PeerFailed(
            f"{self._title} has answered a request for {size} bytes with {answer.status}: {why}",
            advice=PEER_REFUSED_ADVICE,
        )

    def _content(self, answer: http.client.HTTPResponse, size: int) -> memoryview:
        """Read into memory that is used for all parts: new memory costs a page fault for each of its pages."""
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view, done = memoryview(self._buffer)[:size], 0
        while done < size:
            count = answer.readinto(view[done:])
            if not count:
                raise PartNotRead(f"{self._title}: the connection ended after {done} of {size} bytes")
            done += count
        return view

    def _connected(self) -> http.client.HTTPConnection:
        if self._aborted:
            raise PartNotRead("the transfer was cancelled")
        if self._connection is None:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_SECONDS, context=_context(self._tls, _stamp(self._tls))
            )
            connection.connect()
            connection.sock.settimeout(SECONDS)
            self._connection = connection
        return self._connection


@lru_cache(maxsize=4)
def _context(tls: Tls, stamp: tuple[int, ...]) -> ssl.SSLContext:
    """Return what connections begin with; `stamp` changes with the files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as strict as gRPC, by which the image was opened
    context.load_verify_locations(tls.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _stamp(tls: Tls) -> tuple[int, ...]:
    return tuple(_changed(path) for path in (tls.ca, tls.certificate, tls.key))


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns
