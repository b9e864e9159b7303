"""A browser's own EventSource and WebSocket through the proxy, over each data plane, to a model that sleeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext

from tests.contract.proxy.stand import PLANES, Stand, standing

SETTINGS = """
  page: {upstream: "http://127.0.0.1:{port}"}
routes: [{path: [/page, /favicon.ico], to: page}, {to: qwen}]
"""
# Returns the events of `rounds` streams; one that ends is opened again by the browser.
EVENTS = """(rounds) => new Promise((done, failed) => {
    const seen = [], source = new EventSource("/stream");
    source.onmessage = (event) => {
        seen.push(event.data);
        if (seen.length === 2 * rounds) { source.close(); done(seen); }
    };
    setTimeout(() => failed(new Error(JSON.stringify(seen))), 25000);
})"""
ECHO = """(words) => new Promise((done, failed) => {
    const seen = [], socket = new WebSocket(`ws://${location.host}/ws`);
    socket.onopen = () => words.forEach((word) => socket.send(word));
    socket.onmessage = (message) => {
        seen.push(message.data);
        if (seen.length === words.length) { socket.close(); }
    };
    socket.onclose = (event) => done([seen, event.wasClean]);
    setTimeout(() => failed(new Error(JSON.stringify(seen))), 25000);
})"""


class Loop:
    """An event loop in a thread, for a proxy that a synchronous browser calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def call(self, function: Callable[[], Any]) -> Any:
        async def work() -> Any:
            return function()

        return self.run(work())

    @contextmanager
    def entered(self, context: AbstractAsyncContextManager[Stand]) -> Iterator[Stand]:
        stand = self.run(context.__aenter__())
        try:
            yield stand
        finally:
            self.run(context.__aexit__(None, None, None))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()


@pytest.mark.parametrize("plane", PLANES)
def test_event_source_wakes_and_comes_again_after_the_end_of_a_stream(
    context: BrowserContext, tmp_path: Path, plane: str
) -> None:
    loop, tab = Loop(), context.new_page()
    with loop.entered(standing(SETTINGS, plane=plane, place=tmp_path)) as stand:
        tab.goto(f"{stand.url}/page")
        loop.call(stand.upstream.may_end.set)
        assert tab.evaluate(EVENTS, 2) == ["first", "second"] * 2
        assert stand.models.calls["wake qwen"] == 1
        tab.close()


@pytest.mark.parametrize("plane", PLANES)
def test_web_socket_wakes_and_is_closed_cleanly(context: BrowserContext, tmp_path: Path, plane: str) -> None:
    loop, tab = Loop(), context.new_page()
    with loop.entered(standing(SETTINGS, plane=plane, place=tmp_path)) as stand:
        tab.goto(f"{stand.url}/page")
        words = ["one", "two", "x" * 100_000]
        assert tab.evaluate(ECHO, words) == [[f"echo {word}" for word in words], True]
        assert stand.models.calls["wake qwen"] == 1
        tab.close()
