"""The playground: a chat through the proxy, whose answer is shown as it comes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import TIMEOUT_MS, logged_in
from tests.browser.scripted import SECONDS, Scripted, served

expect.set_options(timeout=TIMEOUT_MS)
HOSTILE = '<img src=x onerror="document.title=1">'


class Proxy(ThreadingHTTPServer):
    """Stands in for Kybernate's proxy: streams one word, and the other ones when `go_on` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.asked: list[Any] = []
        self.go_on = threading.Event()
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answering(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:  # http.server's name
        self._begin(200, "application/json")
        self.wfile.write(json.dumps({"data": [{"id": "llama"}, {"id": HOSTILE}]}).encode())

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if self.server.status != 200:
            self._begin(self.server.status, "application/json")
            self.wfile.write(b'{"error": {"message": "the model does not wake: no room"}}')
            return
        self._begin(200, "text/event-stream")
        self._say("Hello")
        self.server.go_on.wait(SECONDS)
        self._say(f" {HOSTILE}")
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()

    def _say(self, text: str) -> None:
        self.wfile.write(f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        yield proxy
        proxy.go_on.set()
        proxy.shutdown()
        thread.join(SECONDS)


@contextmanager
def playground(source: Scripted, tmp_path: Path, context: BrowserContext, url: str) -> Iterator[Page]:
    with served(source, tmp_path, proxy=url) as page_server:
        tab = logged_in(context, page_server)
        tab.get_by_role("link", name="Playground").click()
        tab.get_by_label("Model").fill("llama")
        tab.get_by_label("Message").fill("Hi")
        yield tab


def test_answer_is_shown_as_it_comes(source: Scripted, tmp_path: Path, context: BrowserContext, proxy: Proxy) -> None:
    with playground(source, tmp_path, context, proxy.url) as tab:
        assert tab.locator("datalist option").count() == 2
        tab.get_by_role("button", name="Send").click()
        answer = tab.locator("#answer")
        expect(answer).to_have_text("Hello")  # while the model still writes
        expect(tab.locator("#chat-state")).to_contain_text("The first word came after")
        proxy.go_on.set()
        expect(answer).to_have_text(f"Hello {HOSTILE}")
        assert tab.locator("main img").count() == 0
        (asked,) = proxy.asked
        assert asked["model"] == "llama"
        assert asked["stream"] is True
        assert asked["messages"] == [{"role": "user", "content": "Hi"}]


def test_refusal_of_the_proxy_is_shown(source: Scripted, tmp_path: Path, context: BrowserContext, proxy: Proxy) -> None:
    proxy.status = 503
    with playground(source, tmp_path, context, proxy.url) as tab:
        tab.get_by_role("button", name="Send").click()
        expect(tab.locator("#chat-state")).to_contain_text("the model does not wake: no room")


def test_proxy_that_is_away_is_said(source: Scripted, tmp_path: Path, context: BrowserContext, proxy: Proxy) -> None:
    url = proxy.url
    proxy.server_close()
    with playground(source, tmp_path, context, url) as tab:
        tab.get_by_role("button", name="Send").click()
        expect(tab.locator("#chat-state")).to_contain_text("does not answer")
