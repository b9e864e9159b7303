"""An image registry in memory, on a real socket: tokens, mounts, parts, ranges, and faults that real ones have.

The real one of the lab shows that the client keeps to the protocol; this one, what the client does when the other side
does not.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, bytes, dict[str, str]]
PATH = re.compile(r"/v2/(?P<name>.+?)/(?P<kind>manifests|blobs)/(?P<rest>.+|)")


@dataclass
class FakeRegistry:
    """The registry. `faults` by the request's first words, such as `GET blobs`, is called before each of them.

    A fault may raise Broken, which closes the connection, or return a status, or one with a body and headers.
    """

    user: str = ""  # with a password of the same letters, by a token
    ranges: bool = True
    takes_parts: bool = True
    upload_host: str = ""  # another one, which takes the uploads
    blobs: dict[tuple[str, str], bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], bytes] = field(default_factory=dict)
    uploads: dict[str, bytearray] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    authorizations: set[str | None] = field(default_factory=set)
    faults: dict[str, Callable[[int], int | Answer | None]] = field(default_factory=dict)
    server: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def blob(self, digest: str) -> bytes:
        return next(content for (_, known), content in self.blobs.items() if known == digest)


class Broken(Exception):
    """The connection is closed without an answer, or in the middle of one."""


@contextmanager
def registry(**options: Any) -> Iterator[FakeRegistry]:
    """Run a registry."""
    it = FakeRegistry(**options)

    class Bound(_Handler):
        registry = it

    it.server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    it.server.daemon_threads = True
    thread = threading.Thread(target=it.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield it
    finally:
        it.server.shutdown()
        it.server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: FakeRegistry

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (Broken, ConnectionError):
            self.close_connection = True

    def _do(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if url.path == "/token":
            return self._token()
        found = PATH.fullmatch(url.path)
        if found is None:
            return self._answer(404)
        what = f"{self.command} {'uploads' if found['rest'].startswith('uploads') else found['kind']}"
        with self.registry.lock:
            self.registry.authorizations.add(self.headers.get("authorization"))
            self.registry.requests[what] += 1
            number = self.registry.requests[what]
        if self.registry.user and self.headers.get("authorization") != "Bearer valid":
            where = f'Bearer realm="http://{self.registry.host}/token",service="here",scope="repository:x:pull"'
            return self._answer(401, headers={"WWW-Authenticate": where})
        fault = self.registry.faults.get(what, lambda number: None)
        self.body = body
        if found_fault := fault(number):
            return self._answer(*(found_fault if isinstance(found_fault, tuple) else (found_fault,)))
        return getattr(self, f"_{what.lower().replace(' ', '_')}")(found["name"], found["rest"])

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _do  # noqa: N815

    def _token(self) -> None:
        wanted = f"Basic {base64.b64encode(f'{self.registry.user}:{self.registry.user}'.encode()).decode()}"
        valid = self.headers.get("authorization") == wanted
        self._answer(200 if valid else 401, json.dumps({"token": "valid"}).encode() if valid else b"{}")

    def _get_manifests(self, name: str, target: str) -> None:
        content = self.registry.manifests.get((name, target))
        self._answer(200, content) if content is not None else self._answer(404)

    def _put_manifests(self, name: str, target: str) -> None:
        digest = f"sha256:{hashlib.sha256(self.body).hexdigest()}"
        for key in (target, digest):
            self.registry.manifests[name, key] = self.body
        self._answer(201)

    def _head_blobs(self, name: str, digest: str) -> None:
        content = self.registry.blobs.get((name, digest))
        self._answer(404) if content is None else self._answer(200, content)

    def _get_blobs(self, name: str, digest: str) -> None:
        content = self.registry.blobs.get((name, digest))
        if content is None:
            return self._answer(404)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if wanted and self.registry.ranges:
            return self._answer(206, content[int(wanted[1]) : int(wanted[2]) + 1])
        return self._answer(200, content)

    def _post_uploads(self, name: str, rest: str) -> None:
        source = (self.query.get("from", ""), self.query.get("mount", ""))
        if source in self.registry.blobs:
            self.registry.blobs[name, source[1]] = self.registry.blobs[source]
            return self._answer(201)
        id = f"{len(self.registry.uploads)}{self.registry.requests.total()}"
        self.registry.uploads[id] = bytearray()
        host = f"http://{self.registry.upload_host}" if self.registry.upload_host else ""
        return self._answer(202, headers={"Location": f"{host}/v2/{name}/blobs/uploads/{id}?state=1"})

    def _patch_uploads(self, name: str, rest: str) -> None:
        if not self.registry.takes_parts:
            return self._answer(405)
        upload = self.registry.uploads[rest.removeprefix("uploads/")]
        start = int(self.headers["content-range"].partition("-")[0])
        if start != len(upload):
            return self._answer(416)
        upload += self.body
        return self._answer(202, headers=self._place(name, rest))

    def _get_uploads(self, name: str, rest: str) -> None:
        self._answer(204, headers=self._place(name, rest))

    def _place(self, name: str, rest: str) -> dict[str, str]:
        last = max(0, len(self.registry.uploads[rest.removeprefix("uploads/")]) - 1)
        return {"Location": f"/v2/{name}/blobs/{rest}?state=2", "Range": f"0-{last}"}

    def _put_uploads(self, name: str, rest: str) -> None:
        content = bytes(self.registry.uploads.pop(rest.removeprefix("uploads/"), b"")) + self.body
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != self.query["digest"]:
            return self._answer(400)
        self.registry.blobs[name, self.query["digest"]] = content
        return self._answer(201)

    def _delete_uploads(self, name: str, rest: str) -> None:
        self.registry.uploads.pop(rest.removeprefix("uploads/"), None)
        self._answer(204)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
