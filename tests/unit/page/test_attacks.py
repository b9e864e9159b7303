"""What others try on the page: forged forms, foreign names, borrowed sessions, names that are markup or headers.

`tests/browser/test_page_attacks.py` has what needs a real connection or a real browser.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from kybernate.node.failure import Invalid
from kybernate.page import app as page_app
from kybernate.page import program
from kybernate.page.access import Access, Role
from kybernate.page.app import COOKIE, SECURE_COOKIE, Page
from kybernate.page.view import Container, Put
from kybernate_shim.logs import Log
from tests.browser.scripted import Scripted, small_node

KEY = b"k" * 32
ACT = {"action": "wake", "key": "k8s.io/b"}


class Site:
    """A page whose requests are made without a network. `logged` are the lines of its log."""

    def __init__(self, *, secure: bool = False) -> None:
        self.source = Scripted(small_node())
        self.access = Access(KEY, time.time)
        self.logged: list[str] = []
        log = Log(self.logged.append, 0, {})
        self.page = Page(self.source, self.access, log, secure=secure, hosts=["gpu-node"])
        self.secure = secure

    def client(self, role: Role | None = None) -> TestClient:
        """Return a browser, which has logged in where a role is given."""
        base = f"{'https' if self.secure else 'http'}://127.0.0.1:7070"
        client = TestClient(self.page.app, base_url=base, follow_redirects=False)
        if role is not None:
            answer = client.post("/login", data={"ticket": self.access.ticket(role)})
            assert answer.status_code == 303
        return client

    def proof(self, client: TestClient) -> str:
        session = self.access.session(client.cookies[SECURE_COOKIE if self.secure else COOKIE])
        assert session is not None
        return self.access.proof(session)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with TestClient(site.page.app):  # follows the source meanwhile
        end = time.monotonic() + 20
        while site.page.known.container("k8s.io/b") is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        yield site


# -- forged requests


@pytest.mark.parametrize("proof", [None, "", "0" * 64, "another session's"])
def test_form_without_the_sessions_proof_does_nothing(site: Site, proof: str | None) -> None:
    client, other = site.client(Role.OPERATOR), site.client(Role.OPERATOR)
    form = dict(ACT)
    if proof is not None:
        form["proof"] = site.proof(other) if proof == "another session's" else proof
    assert client.post("/act", data=form).status_code == 403
    headers = {"x-proof": form.get("proof", "")}
    assert client.post("/chat", content=b"{}", headers=headers).status_code == 403
    assert client.post("/logout", data=form).status_code == 403
    assert site.source.asked == []


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},  # another port of this host, whose pages get its cookies, too
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://evil.example"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1.evil.example:7070"},
    ],
)
def test_form_of_another_page_is_refused_with_a_proof_as_well(site: Site, headers: dict[str, str]) -> None:
    client = site.client(Role.OPERATOR)
    form = {**ACT, "proof": site.proof(client)}
    assert client.post("/act", data=form, headers=headers).status_code == 403
    assert client.post("/login", data={"ticket": site.access.ticket(Role.VIEWER)}, headers=headers).status_code == 403
    assert site.source.asked == []
    for own in ({"sec-fetch-site": "same-origin"}, {"origin": "null"}, {"origin": "http://127.0.0.1:7070"}):
        assert client.post("/act", data=form, headers=own).status_code == 200


def test_actions_are_no_get(site: Site) -> None:
    client = site.client(Role.OPERATOR)
    for path in ("/act", "/chat", "/logout"):
        assert client.get(path, params={**ACT, "proof": site.proof(client)}).status_code == 405
    assert site.source.asked == []


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7070", "127.0.0.1.evil.example", "gpu-node.evil", ""])
def test_foreign_name_is_refused(site: Site, host: str) -> None:
    client = site.client(Role.OPERATOR)
    for path in ("/", "/login", "/static/page.js", "/healthz"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "gpu-node" not in answer.text.replace(host, "")


@pytest.mark.parametrize("host", ["127.0.0.1:7070", "10.1.2.3", "[::1]:7070", "localhost:1234", "GPU-node:7070"])
def test_own_names_are_served(site: Site, host: str) -> None:
    assert site.client().get("/login", headers={"host": host}).status_code == 200


# -- roles and sessions


def routes(site: Site) -> list[tuple[str, str]]:
    """Return method and path of everything that the page answers, with a value for each parameter."""
    found = []
    for route in site.page.app.routes:
        assert isinstance(route, Route)
        path = route.path.replace("{names}", "containers").replace("{name}", "page.js")
        found += [(method, path) for method in sorted(route.methods or ()) if method != "HEAD"]
    return found


PUBLIC = {("GET", "/login"), ("POST", "/login"), ("GET", "/static/page.js"), ("GET", "/healthz")}
OPERATORS = {("GET", "/confirm"), ("GET", "/log"), ("POST", "/act"), ("POST", "/chat"), ("GET", "/playground")}


def test_every_path_needs_a_session_and_operators_paths_their_role(site: Site) -> None:
    stranger, viewer = site.client(), site.client(Role.VIEWER)
    assert set(routes(site)) >= PUBLIC | OPERATORS
    for method, path in routes(site):
        if (method, path) in PUBLIC:
            continue
        assert stranger.request(method, path).status_code == 401, path
        if (method, path) in OPERATORS:
            answer = viewer.request(method, path, params=ACT, data={**ACT, "proof": site.proof(viewer)})
            assert answer.status_code == 403, path
    assert site.source.asked == []


def test_viewers_cookie_is_no_operators(site: Site) -> None:
    import base64

    viewer = site.client(Role.VIEWER)
    text = base64.urlsafe_b64decode(viewer.cookies[COOKIE])
    forged = base64.urlsafe_b64encode(text.replace(b"viewer", b"operator")).decode()
    client = site.client()
    client.cookies.set(COOKIE, forged)
    assert client.get("/").status_code == 401
    assert client.post("/act", data=ACT).status_code == 401


def test_cookie_that_was_copied_ends_with_its_session(site: Site) -> None:
    client, thief = site.client(Role.OPERATOR), site.client()
    thief.cookies.set(COOKIE, client.cookies[COOKIE])
    assert thief.get("/").status_code == 200
    assert client.post("/logout", data={"proof": site.proof(client)}).status_code == 303
    assert thief.get("/").status_code == 401


def test_cookie_is_kept_from_scripts_other_sites_and_clear_text() -> None:
    def cookie(site: Site) -> str:
        answer = site.client().post("/login", data={"ticket": site.access.ticket(Role.OPERATOR)})
        return str(answer.headers["set-cookie"])

    plain, tls = cookie(Site()), cookie(Site(secure=True))
    for found in (plain, tls):
        assert "HttpOnly" in found
        assert "SameSite=strict" in found
        assert "Domain" not in found
    assert "Secure" not in plain
    assert tls.startswith("__Host-")
    assert "Secure" in tls
    assert "Path=/" in tls


def test_link_leaks_by_neither_referrer_nor_cache_nor_log(site: Site) -> None:
    client, ticket = site.client(), site.access.ticket(Role.OPERATOR)
    shown = client.get("/login", params={"ticket": ticket})
    assert shown.headers["referrer-policy"] == "no-referrer"
    assert shown.headers["cache-control"] == "no-store"
    for method in ("GET", "HEAD"):  # what only looks, such as the preview of a chat program, does not spend it
        assert client.request(method, "/login", params={"ticket": ticket}).status_code == 200
    answer = client.post("/login", data={"ticket": ticket})
    assert answer.headers["location"] == "/"
    assert client.post("/login", data={"ticket": ticket}).status_code == 403
    assert not [line for line in site.logged if ticket in line]
    session = site.access.session(answer.cookies[COOKIE])
    assert session is not None
    assert any(session.id in line for line in site.logged)
    assert not [line for line in site.logged if answer.cookies[COOKIE] in line]


# -- what is sent


@pytest.mark.parametrize("path", ["/", "/login", "/static/page.js", "/none", "/section/none", "/static/none"])
def test_every_answer_has_the_policy(site: Site, path: str) -> None:
    answer = site.client(Role.VIEWER).get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "name",
    [
        "../app.py",
        "..%2fapp.py",
        "%2e%2e%2fapp.py",
        "....//app.py",
        "page.js%00.html",
        "/etc/passwd",
        "..\\app.py",
        ".",
    ],
)
def test_static_files_are_those_of_the_list(site: Site, name: str) -> None:
    answer = site.client().get(f"/static/{name}")
    assert answer.status_code in (307, 401, 404)
    assert "import" not in answer.text


@pytest.mark.parametrize("text", ["a\r\nset-cookie: x=1", "a\nx: y", "\x00", "\u2028</script>", "%0d%0ax: y"])
def test_names_are_no_headers(site: Site, text: str) -> None:
    site.source.say(Put(Container(text, text, text, "running", "suspended")))
    client = site.client(Role.OPERATOR)
    for path, params in {
        "/container": {"container": text},
        "/": {"q": text, "page": text, "level": text},
        "/section/containers": {"q": text},
        "/confirm": {"action": "wake", "key": text},
        "/login": {"ticket": text},
    }.items():
        answer = client.get(path, params=params)
        assert answer.status_code in (200, 404), path
        assert "set-cookie" not in answer.headers
        assert "x" not in answer.headers
    answer = client.post("/act", data={"action": "wake", "key": text, "proof": site.proof(client)})
    assert "set-cookie" not in answer.headers
    for line in site.logged:
        assert "\n" not in line.rstrip("\n")
        json.loads(line)


def test_lines_of_a_log_are_no_events(site: Site) -> None:
    """A line that looks like SSE stays one line of data."""
    hostile = 'x\n\nevent: absent\ndata: "gone"\r\n\r\n'

    async def lines() -> list[str]:
        async def source() -> object:
            yield hostile

        return [event async for event in site.page._lines(source())]  # type: ignore[arg-type]

    first, end = asyncio.run(lines())
    assert first == f"data: {json.dumps(hostile)}\n\n"
    assert first.count("\n") == 2
    assert end.startswith("event: absent\n")


# -- exhaustion


def test_streams_are_bounded_for_a_session_for_viewers_and_for_all(site: Site) -> None:
    async def scenario() -> None:
        async def endless() -> object:
            while True:
                yield "data: 1\n\n"

        def begun(role: Role) -> object:
            session = site.access.spend(site.access.ticket(role))
            assert session is not None
            return session

        async def taken(session: object, count: int) -> int:
            """Begin so many streams; return how many were refused."""
            refused = 0
            for _ in range(count):
                answer = site.page._stream(session, endless())  # type: ignore[arg-type]
                if answer.status_code == 503:
                    refused += 1
                else:
                    streams.append(answer.body_iterator)  # type: ignore[attr-defined]
                    await anext(streams[-1])
            return refused

        streams: list[object] = []
        one = begun(Role.VIEWER)
        assert await taken(one, page_app.SESSION_STREAMS + 3) == 3
        others = [begun(Role.VIEWER) for _ in range(10)]
        assert sum([await taken(other, 10) for other in others]) == 110 + 2 - page_app.VIEWERS_STREAMS
        assert await taken(begun(Role.OPERATOR), 5) == 0  # viewers have left some
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        assert site.page._streams.total() == site.page._viewers == 0
        assert await taken(one, 1) == 0

    asyncio.run(scenario())


def test_bodies_are_bounded(site: Site) -> None:
    client = site.client(Role.OPERATOR)
    assert client.post("/act", content=b"a=" + b"x" * page_app.FORM_BYTES).status_code == 413
    assert client.post("/act", content=b"&".join(b"a=b" for _ in range(1000))).status_code == 413
    assert client.post("/login", content=b"ticket=" + b"x" * page_app.FORM_BYTES).status_code == 403
    headers = {"x-proof": site.proof(client)}
    assert client.post("/chat", content=b"x" * (page_app.CHAT_BYTES + 1), headers=headers).status_code in (404, 413)


# -- where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gpu-node"])
def test_other_machines_reach_it_by_tls_alone(tmp_path: Path, host: str) -> None:
    serving = program.Serving(host, 0, socket=tmp_path / "s", session_key=tmp_path / "k")
    with pytest.raises(Invalid, match="without TLS their network sees the sessions"):
        asyncio.run(program.serve(serving, Scripted(), Log(lambda line: None, 0, {})))
    assert not (tmp_path / "k").exists()
