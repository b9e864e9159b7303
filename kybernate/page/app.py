"""The page's answers to HTTP requests.

Everything but the login needs a session; actions, the playground and logs need an operator's. Nothing in a page is a
script or a style of its own (CSP), so that a name that a tenant has chosen cannot become one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from kybernate.logs import Log
from kybernate.node.failure import Failure
from kybernate.page.access import Access, Role, Session
from kybernate.page.chat import Chat, ChatRefused
from kybernate.page.guard import Headers, OwnAddress
from kybernate.page.known import Known
from kybernate.page.render import LABELS, Query, Renderer
from kybernate.page.source import Action, ActionRefused, LogAbsent, Source
from kybernate.page.view import Section

COOKIE: Final = "kybernate-page"
SECURE_COOKIE: Final = "__Host-kybernate-page"  # by TLS: no other host of a domain can set it
FORM_BYTES: Final = 16 << 10
CHAT_BYTES: Final = 256 << 10
STREAMS: Final = 64  # of changes and logs, of all browsers together
VIEWERS_STREAMS: Final = 48  # of these, so that viewers leave some to operators
SESSION_STREAMS: Final = 12  # of one session
STREAM_SECONDS: Final = 0.5  # that changes are collected for
PING_SECONDS: Final = 15.0
BODY_SECONDS: Final = 10.0  # for all of a request's body
STATIC: Final[Mapping[str, str]] = {"page.js": "text/javascript", "page.css": "text/css", "icon.svg": "image/svg+xml"}


class TooLarge(Exception):
    """A body has more bytes than its request may have, or took too long."""


class Page:
    """The application: `app` is what a server runs, `follow` takes over the source's changes while it does.

    `secure`: browsers reach the page by TLS alone, and so its cookie is sent by TLS alone. `hosts` are the names by
    which they do, in addition to addresses and "localhost".
    """

    def __init__(
        self,
        source: Source,
        access: Access,
        log: Log,
        *,
        chat: Chat | None = None,
        secure: bool = False,
        hosts: Collection[str] = (),
    ) -> None:
        self._source, self._access, self._log, self._chat, self._secure = source, access, log, chat, secure
        self.known = Known(time.time_ns() // 1_000_000)
        self._renderer = Renderer(self.known, playground=chat is not None)
        self._changed = asyncio.Event()
        self._cookie = SECURE_COOKIE if secure else COOKIE
        self._streams: Counter[str] = Counter()  # by session
        self._viewers = 0  # streams of theirs
        self._stopped = asyncio.Event()
        self._static = {name: (files("kybernate.page") / "static" / name).read_bytes() for name in STATIC}
        self.app = Starlette(routes=self._routes(), lifespan=self._lifespan, middleware=_middleware(hosts))

    def _routes(self) -> list[Route]:
        looking: dict[str, Callable[[Request, Session], Any]] = {
            "/": self._view("overview.html"),
            "/seats": self._view("seats.html"),
            "/images": self._view("images.html"),
            "/events": self._view("events.html"),
            "/container": self._view("container.html"),
            "/section/{names}": self._sections,
            "/changes": self._changes,
        }
        acting: dict[str, Callable[[Request, Session], Any]] = {"/confirm": self._confirm, "/log": self._log_of}
        posting: dict[str, Callable[[Request, Session], Any]] = {"/act": self._act, "/chat": self._talk}
        return [
            *(Route(path, self._for(Role.VIEWER, answer)) for path, answer in looking.items()),
            *(Route(path, self._for(Role.OPERATOR, answer)) for path, answer in acting.items()),
            *(Route(path, self._for(Role.OPERATOR, answer), methods=["POST"]) for path, answer in posting.items()),
            Route("/playground", self._for(Role.OPERATOR, self._playground)),
            Route("/login", self._login_form),
            Route("/login", self._login, methods=["POST"]),
            Route("/logout", self._for(Role.VIEWER, self._logout), methods=["POST"]),
            Route("/static/{name}", self._file),
            Route("/healthz", lambda request: PlainTextResponse("ok\n")),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(self.follow())
        try:
            yield
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    def stop(self) -> None:
        """End all streams, so that the server's end waits for none of them. Browsers connect again by themselves."""
        self._stopped.set()

    async def follow(self) -> None:
        """Take over the source's changes, without an end."""
        async for change in self._source.changes():
            if self.known.apply(change):
                self._changed.set()
                self._changed = asyncio.Event()

    # -- who asks

    def _for(self, role: Role, answer: Callable[[Request, Session], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            session = self._access.session(request.cookies.get(self._cookie, ""))
            if session is None:
                return _login_needed(request)
            if role is Role.OPERATOR and session.role is not Role.OPERATOR:
                return PlainTextResponse("This needs the role of an operator; the session is a viewer's.\n", 403)
            try:
                response: Response = await answer(request, session)
            except TooLarge:
                return PlainTextResponse("The request's body is too large or came too slowly.\n", 413)
            return response

        return endpoint

    async def _login_form(self, request: Request) -> Response:
        ticket = request.query_params.get("ticket", "")
        return self._html("login.html", Role.VIEWER, ticket=ticket, failed=False)

    async def _login(self, request: Request) -> Response:
        try:
            session = self._access.spend((await _form(request)).get("ticket", ""))
        except TooLarge:
            session = None
        if session is None:
            return self._html("login.html", Role.VIEWER, 403, ticket="", failed=True)
        self._log.info("session.started", session=session.id, role=session.role, peer=_peer(request))
        response = RedirectResponse("/", 303)
        response.set_cookie(
            self._cookie, self._access.cookie(session), httponly=True, samesite="strict", secure=self._secure
        )
        return response

    async def _logout(self, request: Request, session: Session) -> Response:
        if not self._access.proves(session, (await _form(request)).get("proof", "")):
            return _forged()
        self._access.end(session)
        self._log.info("session.ended", session=session.id, role=session.role, peer=_peer(request))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(self._cookie, secure=self._secure, httponly=True, samesite="strict")
        return response

    # -- what is looked at

    def _view(self, template: str) -> Callable[[Request, Session], Any]:
        async def answer(request: Request, session: Session) -> Response:
            query = Query.of(request.query_params)
            selected = self.known.container(query.container)
            if template == "container.html" and selected is None:
                return self._html("absent.html", session.role, 404, session=session, query=query)
            return self._html(
                template,
                session.role,
                session=session,
                query=query,
                selected=selected,
                proof=self._access.proof(session),
                section=lambda one: self._renderer.section(one, query, session.role),
            )

        return answer

    async def _playground(self, request: Request, session: Session) -> Response:
        models = await self._chat.models() if self._chat is not None else []
        proof = self._access.proof(session)
        return self._html("playground.html", session.role, session=session, query=Query(), proof=proof, models=models)

    async def _sections(self, request: Request, session: Session) -> Response:
        """Answer with several sections of one page, by their names with commas between: those that have changed."""
        names = dict.fromkeys(request.path_params["names"].split(","))
        if not names.keys() <= set(Section):
            return PlainTextResponse("There is no such section.\n", 404)
        wanted, query = tuple(map(Section, names)), Query.of(request.query_params)
        headers = {"cache-control": "no-store", "vary": "Accept-Encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return HTMLResponse(self._renderer.sections(wanted, query, session.role), headers=headers)
        packed = self._renderer.packed(wanted, query, session.role)
        return HTMLResponse(packed, headers=headers | {"content-encoding": "gzip"})

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._static:
            return PlainTextResponse("There is no such file.\n", 404)
        return Response(self._static[name], media_type=STATIC[name], headers={"cache-control": "max-age=300"})

    async def _changes(self, request: Request, session: Session) -> Response:
        return self._stream(session, self._versions(session))

    async def _versions(self, session: Session) -> AsyncIterator[str]:
        """Yield the versions of all sections, now and when they change, as events."""
        while self._access.lasts(session):
            changed = self._changed
            yield f"data: {json.dumps({one: self._renderer.version(one) for one in Section})}\n\n"
            await asyncio.sleep(STREAM_SECONDS)
            while changed is self._changed:
                try:
                    await asyncio.wait_for(changed.wait(), PING_SECONDS)
                except TimeoutError:
                    if not self._access.lasts(session):
                        return
                    yield ": nothing has changed\n\n"

    async def _log_of(self, request: Request, session: Session) -> Response:
        container = self.known.container(Query.of(request.query_params).container)
        if container is None:
            return PlainTextResponse("There is no such container.\n", 404)
        return self._stream(session, self._lines(self._source.log(container)))

    async def _lines(self, lines: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            async for line in lines:
                yield f"data: {json.dumps(line)}\n\n"
        except LogAbsent as failure:
            yield f"event: absent\ndata: {json.dumps(_sentence(failure))}\n\n"
        except Failure as failure:  # the browser asks again by itself
            yield f"event: away\ndata: {json.dumps(_sentence(failure))}\n\n"
        else:
            yield f"event: absent\ndata: {json.dumps('The container is removed: this is the end of its output.')}\n\n"

    def _stream(self, session: Session, events: AsyncIterator[str]) -> Response:
        viewer = session.role is Role.VIEWER
        if self._streams.total() >= STREAMS or (viewer and self._viewers >= VIEWERS_STREAMS):
            return PlainTextResponse("Too many browsers follow the page; try again later.\n", 503)
        if self._streams[session.id] >= SESSION_STREAMS:
            return PlainTextResponse("Too many tabs of this session follow the page; close some.\n", 503)

        async def counted() -> AsyncIterator[str]:
            self._streams[session.id] += 1  # here: a stream whose client has gone before it began is never closed
            self._viewers += viewer
            try:
                async for event in _until(self._stopped, events):
                    yield event
            finally:
                self._viewers -= viewer
                self._streams[session.id] -= 1
                if not self._streams[session.id]:
                    del self._streams[session.id]

        return StreamingResponse(
            counted(), media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )

    # -- what is done

    async def _confirm(self, request: Request, session: Session) -> Response:
        action, key = _asked(request.query_params)
        if action is None or (title := self._title(action, key)) is None:
            return PlainTextResponse("There is no such action, container or image.\n", 404)
        template = "confirm_dialog.html" if "fragment" in request.query_params else "confirm.html"
        return self._html(
            template,
            session.role,
            session=session,
            query=Query(),
            proof=self._access.proof(session),
            action=action,
            label=LABELS[action],
            key=key,
            title=title,
        )

    def _title(self, action: Action, key: str) -> str | None:
        if action.of_image:
            image = self.known.image(key)
            return image.name if image else None
        container = self.known.container(key)
        return container.title if container else None

    async def _act(self, request: Request, session: Session) -> Response:
        form = await _form(request)
        if not self._access.proves(session, form.get("proof", "")):
            return _forged()
        action, key = _asked(form)
        if action is None or self._title(action, key) is None:
            return PlainTextResponse("There is no such action, container or image.\n", 404)
        self._log.info("action.requested", action=action, key=key, session=session.id, peer=_peer(request))
        try:
            said, status = await self._source.act(action, key), 200
        except ActionRefused as failure:
            said, status = _sentence(failure), 409
        template = "said.html" if "fragment" in form else "result.html"
        return self._html(template, session.role, status, session=session, query=Query(), said=said)

    async def _talk(self, request: Request, session: Session) -> Response:
        if not self._access.proves(session, request.headers.get("x-proof", "")):
            return _forged()
        if self._chat is None:
            return PlainTextResponse("The page was started without the address of a proxy.\n", 404)
        body = await _body(request, CHAT_BYTES)
        try:
            answer = self._chat.ask(body)
            first = await anext(answer, b"")
        except ChatRefused as failure:
            return PlainTextResponse(_sentence(failure) + "\n", 502)

        async def all() -> AsyncIterator[bytes]:
            yield first
            async for part in answer:
                yield part

        return StreamingResponse(all(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    def _html(self, template: str, role: Role, status: int = 200, **facts: Any) -> HTMLResponse:
        text = self._renderer.render(template, role, **facts)
        return HTMLResponse(text, status, headers={"cache-control": "no-store"})


async def _until(stopped: asyncio.Event, events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield events until they end, or are to end."""
    ending = asyncio.ensure_future(stopped.wait())
    coming: asyncio.Future[str] = asyncio.ensure_future(anext(events))
    try:
        while not stopped.is_set():
            await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                yield coming.result()
                coming = asyncio.ensure_future(anext(events))
    except StopAsyncIteration:
        return
    finally:
        ending.cancel()
        coming.cancel()
        await asyncio.gather(ending, coming, return_exceptions=True)
        await events.aclose()  # type: ignore[attr-defined]  # all are generators


def _middleware(hosts: Collection[str]) -> list[Middleware]:
    return [
        Middleware(Headers),
        Middleware(OwnAddress, hosts=hosts),
        Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5),
    ]


def _login_needed(request: Request) -> Response:
    if "text/html" in request.headers.get("accept", "") and request.method == "GET":
        return RedirectResponse("/login", 303)
    return PlainTextResponse("The session has ended. `kybernate page` prints a link that begins one.\n", 401)


def _forged() -> Response:
    return PlainTextResponse("The form is not one of this session. Load the page again.\n", 403)


def _sentence(failure: Failure) -> str:
    return ". ".join(part.rstrip(".") for part in (str(failure), failure.state, failure.advice) if part) + "."


def _peer(request: Request) -> str:
    return request.client.host if request.client else "an unknown address"


def _asked(values: Mapping[str, str]) -> tuple[Action | None, str]:
    """Return the action and the key of a form: of a button, which has both in one value, or of its confirmation."""
    name, _, key = values.get("ask", "").partition(" ")
    name, key = values.get("action", name), values.get("key", key)
    return Action(name) if name in list(Action) else None, key


async def _form(request: Request) -> dict[str, str]:
    """Return a form's fields, the first of each name. Raises TooLarge."""
    text = (await _body(request, FORM_BYTES)).decode("utf-8", "replace")
    try:
        return {name: values[0] for name, values in parse_qs(text, max_num_fields=16).items()}
    except ValueError as error:
        raise TooLarge from error


async def _body(request: Request, most: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise TooLarge
    except (TimeoutError, ClientDisconnect) as error:
        raise TooLarge from error
    return bytes(body)
