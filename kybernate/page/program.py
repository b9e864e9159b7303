"""The page's program: an HTTP server, and a socket on which `kybernate page` asks it for a link."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kybernate.logs import Log, open_log
from kybernate.node.failure import Invalid, Unavailable
from kybernate.page.access import SESSION_SECONDS, Access, Role, key_of
from kybernate.page.app import Page
from kybernate.page.chat import Chat
from kybernate.page.node import NodeSource
from kybernate.page.source import Source
from kybernate_shim import bounded_json

SOCKET: Final = Path("/run/kybernate/page.sock")
KEY: Final = Path("/var/lib/kybernate/page.key")
CONNECTIONS: Final = 256  # to the HTTP server
OF_ONE_ADDRESS: Final = 192  # of these
UNREAD_MS: Final = 60_000  # until a connection ends whose client takes nothing of what is sent
FIRST_REQUEST_SECONDS: Final = 10.0  # from the connection to the end of its request's headers
KEEP_ALIVE_SECONDS: Final = 30
STOP_SECONDS: Final = 2
ASKED_BYTES: Final = 1024  # of a request on the socket
ASKED_SECONDS: Final = 5.0
CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid; unix(7), SO_PEERCRED


@dataclass(frozen=True)
class Serving:
    """Where the page listens and what it uses; `url` is what links begin with.

    `plaintext`: other machines may reach it without TLS.
    """

    host: str
    port: int
    url: str = ""
    agent: str = ""
    proxy: str = ""
    proxy_key: str = ""
    certificate: Path | None = None
    key: Path | None = None
    socket: Path = SOCKET
    session_key: Path = KEY
    plaintext: bool = False


def run(serving: Serving) -> None:
    """Serve the page of a node until SIGTERM or SIGINT. Raises Unavailable."""
    asyncio.run(serve(serving, NodeSource(serving.agent), open_log("info")))


async def serve(serving: Serving, source: Source, log: Log) -> None:
    """Serve the page of what a source knows, until the process is asked to end or the task is cancelled.

    Raises Invalid and Unavailable.
    """
    if not (serving.certificate or serving.plaintext or serving.url.startswith("https:") or _is_loopback(serving.host)):
        raise Invalid(
            f"other machines reach {serving.host}, and without TLS their network sees the sessions of operators",
            advice="add --certificate and --key; --url https://… where a proxy in front has them; or listen on"
            " 127.0.0.1. --plaintext serves it nevertheless",
        )
    access = Access(key_of(serving.session_key), time.time)
    page = Page(
        source,
        access,
        log,
        chat=Chat(serving.proxy, serving.proxy_key) if serving.proxy else None,
        secure=serving.certificate is not None or serving.url.startswith("https:"),
        hosts=[name for name in (serving.host, socket.gethostname(), host_of(serving.url)) if name],
    )
    server = Quiet(
        page.stop,
        uvicorn.Config(
            page.app,
            http=Prompt,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=bool(serving.url),  # only a proxy in front says truly who is behind it
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
            ssl_certfile=serving.certificate,
            ssl_keyfile=serving.key,
        ),
    )
    with _listening(serving.host, serving.port) as listening, _unix_socket(serving.socket) as control:
        links = Links(access, serving.url or _url(serving, listening.getsockname()[1]))
        async with await asyncio.start_unix_server(links.answer, sock=control, limit=ASKED_BYTES):
            await _until_cancelled(server, listening)


class Quiet(uvicorn.Server):
    """A server whose process ends with status 0 when it is asked to end, and not by the signal that asked.

    `stop` is called before it waits for what is being answered.
    """

    def __init__(self, stop: Callable[[], None], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # a test's; its task is cancelled
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, setattr, self, "should_exit", True)
        yield


async def _until_cancelled(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve, and end the requests in progress when the task is cancelled."""
    serving = asyncio.create_task(server.serve([listening]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


class Prompt(H11Protocol):
    """A connection that is closed unless its first request comes soon; later ones have uvicorn's own limit.

    One address has some of all connections, and a client that does not read loses its own.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        with suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        peers = [client[0] for one in self.connections if (client := getattr(one, "client", None))]
        if self.client is not None and peers.count(self.client[0]) > OF_ONE_ADDRESS:
            transport.abort()
        self._first = self.loop.call_later(FIRST_REQUEST_SECONDS, self._close_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._first.cancel()
        super().connection_lost(exc)

    def _close_idle(self) -> None:
        if self.cycle is None:
            self.transport.close()


class Links:
    """Answers on the socket: {"role": …, "seconds": …} with {"url": …} or {"error": …}.

    Root and the user of the page's process get a link of each role, others who can open the socket one of a viewer.
    """

    def __init__(self, access: Access, url: str) -> None:
        self._access, self._url = access, url

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        try:
            async with asyncio.timeout(ASKED_SECONDS):
                asked = bounded_json.parse(await reader.readline())
            text = self._answer(asked, _uid_of(writer.get_extra_info("socket")))
        except (TimeoutError, ValueError, OSError):
            text = {"error": "the request is not one line of JSON"}
        writer.write(json.dumps(text).encode() + b"\n")
        writer.close()

    def _answer(self, asked: Any, uid: int) -> dict[str, str]:
        role = asked.get("role") if isinstance(asked, dict) else None
        seconds = asked.get("seconds", SESSION_SECONDS) if isinstance(asked, dict) else None
        if role not in list(Role) or not isinstance(seconds, int | float) or not 0 < seconds <= 366 * 86400:
            return {"error": "a request has a role and the seconds of a session, at most a year"}
        if role == Role.OPERATOR and uid not in (0, os.geteuid()):
            return {"error": f"uid {uid} may have a link for a viewer alone: `kybernate page --role viewer`"}
        return {"url": f"{self._url}/login?ticket={self._access.ticket(Role(role), seconds)}"}


def link(role: Role, seconds: float, path: Path = SOCKET) -> str:
    """Ask the page's process for a link. Raises Unavailable."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(ASKED_SECONDS)
            asking.connect(str(path))
            asking.sendall(json.dumps({"role": role, "seconds": seconds}).encode() + b"\n")
            with asking.makefile("rb") as answers:
                answer = bounded_json.parse(answers.readline(ASKED_BYTES))
    except PermissionError as error:
        raise Unavailable(
            f"{path} may not be opened by this user", advice="ask root, or join the group that owns it"
        ) from error
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"no page answers on {path}: {error}", advice="start it: `kybernate page serve`, or its systemd unit"
        ) from error
    if "error" in answer:
        raise Unavailable(f"the page gave no link: {answer['error']}")
    return str(answer["url"])


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
        except (OSError, OverflowError) as error:
            raise Unavailable(
                f"the page cannot listen on {host}, port {port}: {error}",
                advice="name another address: `kybernate page serve --listen HOST:PORT`",
            ) from error
        yield listening


@contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """Open the socket for links, for root and the group of its directory; one that another process has is not taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) == 0:
                    raise Unavailable(f"another page listens on {path}", advice="stop it first")
            path.unlink(missing_ok=True)
            control.bind(str(path))
            os.chown(path, -1, path.parent.stat().st_gid)
            path.chmod(0o660)
        except OSError as error:
            raise Unavailable(f"{path} cannot be opened: {error.strerror}") from error
        yield control
        path.unlink(missing_ok=True)


def _uid_of(connected: socket.socket) -> int:
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(found)[1])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(serving: Serving, port: int) -> str:
    """Return what browsers reach the page by: the node's name where it listens on all addresses."""
    host = socket.gethostname() if serving.host in ("0.0.0.0", "::") else serving.host
    return f"{'https' if serving.certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def host_of(url: str) -> str:
    """Return the host that a URL names, "" without one. Raises ValueError."""
    return urlsplit(url).hostname or ""


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT", "[HOST]:PORT" or ":PORT". Raises ValueError."""
    host, _, port = text.rpartition(":")
    return host.strip("[]") or "0.0.0.0", int(port)
