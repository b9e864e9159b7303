"""A proxy between clients and upstreams of the tests: real sockets, and models that sleep and wake as a test says.

The models stand in for containers and their agent, the upstreams for servers of models.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from kybernate.proxy import service
from kybernate.proxy.holding import Phase
from kybernate.proxy.models import SuspendFailed, WakeFailed
from kybernate.proxy.service import Service
from kybernate.proxy.settings import Model, parse
from kybernate_shim.logs import Log

PLANES = ("embedded", "haproxy")
CHAT = {"model": "qwen", "messages": [{"role": "user", "content": "hello"}]}
SECONDS = 20.0


class FakeModels:
    """Models of a test. `may_wake` is set while wakes may finish, `may_sleep` while suspends may.

    `failure` fails both.
    """

    def __init__(self, phases: dict[str, Phase]) -> None:
        self.phases = phases
        self.calls: Counter[str] = Counter()  # "wake qwen", "suspend qwen"
        self.may_wake, self.may_sleep = asyncio.Event(), asyncio.Event()
        self.may_wake.set()
        self.may_sleep.set()
        self.failure = ""
        self.used = False  # by others, or on a GPU
        self.reports: list[tuple[str, int]] = []
        self.hooks: list[Callable[[], Any]] = []
        self._changes: asyncio.Queue[tuple[str, Phase]] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[tuple[str, Phase]]:
        for name, phase in self.phases.items():
            yield name, phase
        while True:
            yield await self._changes.get()

    def change(self, name: str, phase: Phase) -> None:
        """Let something else than the proxy change a model."""
        self.phases[name] = phase
        self._changes.put_nowait((name, phase))

    def all_said(self) -> bool:
        """Return whether the proxy has heard of all changes."""
        return self._changes.empty()

    async def wake(self, model: Model) -> None:
        self.calls[f"wake {model.name}"] += 1
        await self.may_wake.wait()
        if self.failure:
            raise WakeFailed(self.failure)
        if self.phases[model.name] == Phase.ABSENT:
            raise WakeFailed("there is no such container", absent=True)
        for hook in self.hooks:
            await hook()
        self.change(model.name, Phase.AWAKE)

    async def suspend(self, model: Model, *, unless_used: bool) -> None:
        self.calls[f"suspend {model.name}"] += 1
        await self.may_sleep.wait()
        if self.used and unless_used:
            raise SuspendFailed("it computes", used=True)
        if self.failure:
            raise SuspendFailed(self.failure)
        self.change(model.name, Phase.ASLEEP)

    async def report(self, model: Model, in_flight: int) -> bool:
        self.reports.append((model.name, in_flight))
        return self.used


MESSAGE = {
    "id": "m", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "hello"}],
    "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 2},
}  # fmt: skip


def answer_to(path: str, value: Any) -> dict[str, Any]:
    """Return what an API answers; a tool that is offered is called."""
    tools = value.get("tools") if isinstance(value, dict) else None
    if path == "/v1/messages":
        called = [{"type": "tool_use", "id": "t", "name": one["name"], "input": {"a": 1}} for one in tools or ()]
        return MESSAGE | ({"content": called, "stop_reason": "tool_use"} if called else {})
    if path.endswith("/embeddings"):
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
        return {"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 1, "total_tokens": 1}}
    calls = [
        {"id": "t", "type": "function", "function": {"name": one["function"]["name"], "arguments": '{"a": 1}'}}
        for one in tools or ()
    ]
    message = {"role": "assistant", "content": None if calls else "hello"} | ({"tool_calls": calls} if calls else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


@dataclass
class Upstream:
    """A program that is called: it says what it got, streams, waits, or becomes a WebSocket, by the path."""

    port: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most: int = 0  # that ran at one time
    gone: int = 0  # requests that were cancelled by their clients
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.ServerRunner | None = None

    async def start(self, port: int = 0) -> None:
        self.runner = web.ServerRunner(
            web.Server(self._answer, handler_cancellation=True, access_log=None), shutdown_timeout=0.1
        )
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._by_path(request)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.running -= 1

    async def _by_path(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path == "/ws":
            return await self._socket(request)
        if path == "/sink":
            size = 0
            async for piece in request.content.iter_any():
                size += len(piece)
            return web.json_response({"size": size})
        if path == "/slow-reader":
            self.seen.append({"path": path})
            await self.may_end.wait()
            return web.json_response({"size": len(await request.read())})
        body = await request.read()
        kind = request.headers.get("content-type", "")
        value = json.loads(body) if "json" in kind and body else {}
        self.seen.append(
            {
                "method": request.method, "path": request.path_qs, "headers": CIMultiDict(request.headers),
                "names": [name for name, _ in request.headers.items()], "body": body, "json": value,
            }
        )  # fmt: skip
        if path == "/wait":
            await self.may_end.wait()
            return web.json_response({"waited": True})
        if path == "/stream":
            return await self._stream(request)
        if path == "/break":
            return await self._break(request)
        if path == "/big":
            return await self._big(request, int(request.query["bytes"]))
        if path.endswith("/chat/completions") and value.get("stream"):
            return await self._chat_stream(request, value)
        if path == "/status":
            return web.Response(status=int(request.query["code"]), text="as asked")
        if path == "/v1/messages" and value.get("stream"):
            return await self._message_stream(request)
        return web.json_response(answer_to(path, value) | {"got": value, "path": request.path_qs})

    async def _socket(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = web.WebSocketResponse()
        await answer.prepare(request)
        async for message in answer:
            await answer.send_str(f"echo {message.data}")
        return answer

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send one event, and the second once `may_end` is set."""
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: first\n\n")
        await self.may_end.wait()
        await answer.write(b"data: second\n\n")
        await answer.write_eof()
        return answer

    async def _break(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"begun")
        assert request.transport is not None
        request.transport.abort()
        return answer

    async def _big(self, request: web.BaseRequest, size: int) -> web.StreamResponse:
        answer = web.StreamResponse()
        answer.content_length = size
        await answer.prepare(request)
        piece = bytes(1 << 20)
        while size:
            await answer.write(piece[:size])
            size -= min(size, len(piece))
        await answer.write_eof()
        return answer

    async def _message_stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send the events of Anthropic's API."""
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        texts = [{"type": "text_delta", "text": word} for word in ("hel", "lo")]
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": MESSAGE | {"content": [], "stop_reason": None}}, block,
            *({"type": "content_block_delta", "index": 0, "delta": text} for text in texts),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        ]  # fmt: skip
        for event in events:
            await answer.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        await answer.write_eof()
        return answer

    async def _chat_stream(self, request: web.BaseRequest, value: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for word in ("hel", "lo"):
            delta = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            content = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [delta]}
            await answer.write(f"data: {json.dumps(content)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


@dataclass
class Stand:
    """What a test works with. `url` is where clients call."""

    url: str
    port: int
    models: FakeModels
    upstream: Upstream
    service: Service
    client: aiohttp.ClientSession
    log: io.StringIO
    plane: str

    async def chat(self, **more: Any) -> aiohttp.ClientResponse:
        """Ask for a completion, and read the whole answer."""
        headers = more.pop("headers", {})
        async with self.client.post(f"{self.url}/v1/chat/completions", json=CHAT | more, headers=headers) as answer:
            await answer.read()
            return answer

    def held(self, name: str = "qwen") -> Any:
        return self.service.engine.held[name]

    async def raw(self, request: bytes) -> bytes:
        """Send bytes on a connection of their own, and return all that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def metrics(self) -> str:
        return self.service.metrics.text().decode()

    @staticmethod
    async def until(condition: Callable[[], Any], what: str = "") -> Any:
        """Wait for a condition, at most some seconds."""
        try:
            async with asyncio.timeout(SECONDS):
                while not (found := condition()):  # noqa: ASYNC110  (any object's state, which sets no event)
                    await asyncio.sleep(0.005)
                return found
        except TimeoutError:
            raise AssertionError(f"never true: {what or condition}") from None


SETTINGS = """
listen: 127.0.0.1:{own}
plane: {plane}
haproxy: {state: {state}}
models:
  qwen:
    container: qwen
    upstream: http://127.0.0.1:{port}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(pid: int) -> None:
    """Kill a HAProxy that may wait for its streams."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


@asynccontextmanager
async def standing(
    more: str = "", *, plane: str, place: Path, phase: Phase = Phase.ASLEEP, model: str = "", top: str = ""
) -> AsyncIterator[Stand]:
    """Start a proxy. `model` is lines of the model qwen, `more` what follows the models, `top` of the top level.

    {port} in them is that of the upstream.
    """
    upstream = Upstream()
    await upstream.start()
    state = Path(mkdtemp(prefix="proxy-"))  # short enough for sockets
    text = SETTINGS + "".join(f"    {line}\n" for line in model.split("\n") if line) + more + "\n" + top
    own = free_port() if plane == "haproxy" else 0
    for name, value in {"plane": plane, "port": upstream.port, "own": own, "state": state}.items():
        text = text.replace(f"{{{name}}}", str(value))
    settings = parse(text)
    models = FakeModels({one.name: phase for one in settings.models if one.container})
    log = io.StringIO()
    running = await service.start(settings, models, Log(lambda line: log.write(line + "\n"), 0, {}))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        stand = Stand(f"http://127.0.0.1:{running.port}", running.port, models, upstream, running, client, log, plane)
        try:
            await stand.until(running.engine.seen.is_set, "the states of the models are known")
            if settings.models:
                await stand.until(lambda: stand.held(settings.models[0].name).phase == phase, str(phase))
            if running.plane is not None and phase == Phase.AWAKE and settings.models[0].name in running.plane.direct:
                await stand.until(lambda: not stand.held().closed, "HAProxy passes its requests")
            yield stand
        finally:
            upstream.may_end.set()
            await running.close(drain=0.2)
            await upstream.stop()
            if running.plane is not None:
                end(running.plane.child.pid)
            shutil.rmtree(state)
    assert "proxy.request_failed" not in log.getvalue(), log.getvalue()
