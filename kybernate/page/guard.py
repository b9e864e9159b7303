"""What is true of every request and answer of the page: by which name it was reached, from which page, and the policy.

Without I/O but for what an ASGI application is called with.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PORT: Final = re.compile(r":[0-9]*$")
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self';"
    " frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


class Headers:
    """Adds the headers by which browsers keep a page to itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


class OwnAddress:
    """Refuses requests that were sent to another name, and those that change something and come from another page.

    The first is what DNS rebinding does: a foreign name that leads here. An address is no such name.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, {host.casefold() for host in hosts} | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            if (refusal := self._refusal(request)) is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if not self._is_ours(host):
            text = "This page has another address: it is an option of `kybernate page serve`, --url.\n"
            return PlainTextResponse(text, 421)
        if request.method not in ("GET", "HEAD") and not self._is_from_here(request, host):
            return PlainTextResponse("The request comes from a page of another site.\n", 403)
        return None

    def _is_ours(self, host: str) -> bool:
        name = host[: host.rindex(":")] if PORT.search(host) else host
        try:
            ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return name.casefold().rstrip(".") in self._hosts
        return True

    def _is_from_here(self, request: Request, host: str) -> bool:
        """Return whether a form is of this page, as far as the browser says where it is from.

        An origin of "null" says nothing: browsers send it for forms of pages without a referrer, as this one is.
        """
        if (site := request.headers.get("sec-fetch-site")) is not None:
            return site in ("same-origin", "none")
        origin = request.headers.get("origin", "null")
        try:
            return origin == "null" or urlsplit(origin).netloc.casefold() == host.casefold()
        except ValueError:  # such as of "http://["
            return False
