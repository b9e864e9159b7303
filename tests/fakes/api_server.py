"""Kubernetes' API server for unit tests: events and pods over real HTTP, with answers that a test chooses.

What it keeps is what was created; a watch sends what `change` is given, until the test ends it. A status below 0 in
`refuse` is the answer to what was taken nevertheless, as where an answer is lost.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
END: None = None


@dataclass
class ApiServer:
    """`refuse` has the statuses for the next writes, then they are taken. `tokens` are those that callers brought."""

    url: str = ""
    events: dict[str, Object] = field(default_factory=dict)
    pods: list[Object] = field(default_factory=list)
    refuse: list[int] = field(default_factory=list)
    refuse_lists: list[int] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    selectors: list[str] = field(default_factory=list)
    lists: int = 0
    _watch: queue.Queue[Object | None] = field(default_factory=queue.Queue)

    def change(self, kind: str, document: Object) -> None:
        """Send a change to the watch that runs, or the next one."""
        self._watch.put({"type": kind, "object": document})

    def end_watch(self) -> None:
        self._watch.put(END)

    def story(self) -> list[tuple[str, str, int]]:
        """Return reason, message and count of each event, in the order of their creation."""
        return [(one["reason"], one["message"], one["count"]) for one in self.events.values()]


def a_pod(name: str, uid: str = "u-1", namespace: str = "shop", containers: tuple[str, ...] = ("main",),
          running: bool = True, **annotations: str) -> Object:  # fmt: skip
    """Return a pod's object; of the names of annotations, `_` stands for what keywords cannot have."""
    notes = {f"kybernate.io/{key.replace('__', '.').replace('_', '-')}": value for key, value in annotations.items()}
    state = {"running": {}} if running else {"waiting": {}}
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": uid, "annotations": notes, "resourceVersion": "7"},
        "spec": {"containers": [{"name": one} for one in containers], "initContainers": [{"name": "setup"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": one, "state": state} for one in containers]},
    }


@contextmanager
def api_server() -> Iterator[ApiServer]:
    there = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            name = body["metadata"]["name"]
            if name in there.events:
                return self._answer(409, {"message": f'events "{name}" already exists'})
            status = self._status("create")
            if status <= 0:
                there.events[name] = body
            return self._answer(abs(status) or 201, body)

        def do_PATCH(self) -> None:
            body, name = self._body(), self.path.rpartition("/")[2]
            if name not in there.events:
                return self._answer(404, {"message": f'events "{name}" not found'})
            status = self._status("patch")
            if status <= 0:
                there.events[name] |= body
            return self._answer(abs(status) or 200, there.events[name])

        def do_GET(self) -> None:
            wanted = parse_qs(urlsplit(self.path).query)
            there.selectors.append(wanted["fieldSelector"][0])
            if "watch" in wanted:
                return self._follow()
            there.lists += 1
            if there.refuse_lists:
                return self._answer(there.refuse_lists.pop(0), {"message": "pods is forbidden"})
            if "continue" not in wanted and len(there.pods) > 1:  # in two pages
                return self._answer(200, {"metadata": {"continue": "more"}, "items": there.pods[:1]})
            items = there.pods[1:] if "continue" in wanted else there.pods
            return self._answer(200, {"metadata": {"resourceVersion": "5"}, "items": items})

        def _follow(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while (change := there._watch.get()) is not END:
                line = json.dumps(change).encode() + b"\n"
                half = len(line) // 2  # no reader may depend on where the pieces end
                for part in (line[:half], line[half:]):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

        def _status(self, verb: str) -> int:
            there.writes.append(verb)
            return there.refuse.pop(0) if there.refuse else 0

        def _body(self) -> Object:
            there.tokens.append(self.headers.get("Authorization", ""))
            found: Object = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            return found

        def _answer(self, status: int, document: Object) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                pass  # the client has gone away

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    there.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield there
    finally:
        there.end_watch()
        server.shutdown()
        server.server_close()
        thread.join(5)
