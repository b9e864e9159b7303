"""HAProxy takes a request for the model that the embedded plane takes it for, or leaves it to that."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict

from kybernate.proxy.embedded.headers import mistake_in
from kybernate.proxy.haproxy.child import find_binary
from kybernate.proxy.haproxy.generated import Places, generated, with_underscores
from kybernate.proxy.haproxy.plane import write_files
from kybernate.proxy.model_field import fields_of
from kybernate.proxy.routing import Head, Load, NeedBody, Router, ToModel
from kybernate.proxy.settings import Settings, parse
from tests.unit.proxy.test_routing import ODD_PATHS, PLAIN_PATHS

SETTINGS = """
listen: 127.0.0.1:1
plane: haproxy
models:
  one: {upstream: "http://127.0.0.1:2", aliases: [org/one, "o\\u00e9"]}
  two: {upstream: "http://127.0.0.1:3"}
  "7": {upstream: "http://127.0.0.1:4"}
  "true": {upstream: "http://127.0.0.1:5"}
routes:
  - {path: /v1, to: two}
  - {path: /team, headers: {X-Team: red}, to: two}
  - {host: two.example, to: two}
  - {path: /keyed, keys: STATE/keys, to: two}
  - {}
haproxy:
  state: STATE
  frontend:
    - acl passes var(txn.backend) -m found
    - http-request set-var(txn.names) req.hdr_names
    - http-request return status 204 unless passes !needs_activator plain_connection
    - http-request return status 200 hdr X-Model %[var(txn.model)] hdr X-Names %[var(txn.names)]
"""
CHAT = "/chat/completions"
JSON = ("Content-Type", "application/json")
Fields = Sequence[tuple[str, str]]


class Haproxy:
    """The process. It answers with the model that it would pass a request to, or leaves it to the activator."""

    def __init__(self, state: Path, settings: str) -> None:
        self.settings: Settings = parse(settings.replace("STATE", str(state)))
        places = Places(state)
        text = generated(self.settings, places, 100).replace("bind 127.0.0.1:1\n", f"bind unix@{state}/public\n")
        (state / "keys").write_text(f"alice {sha256(b'sk-a').hexdigest()}\n")
        write_files(self.settings, places)
        places.config.write_text(text)
        self.socket = str(state / "public")
        self.process = subprocess.Popen([find_binary(), "-db", "-f", places.config])

    @classmethod
    @contextmanager
    def running(cls, state: Path, settings: str) -> Iterator[Haproxy]:
        """Run it in a directory whose path is short enough for sockets."""
        found = cls(state, settings)
        try:
            while not os.path.exists(found.socket):  # noqa: PTH110
                assert found.process.poll() is None
                time.sleep(0.005)
            yield found
        finally:
            found.process.kill()
            found.process.wait()

    def exchange(self, request: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.socket)
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            found = bytearray()
            try:
                while piece := connection.recv(65536):
                    found += piece
            except ConnectionResetError:
                pass
            return bytes(found)

    def answered(self, target: str, fields: Fields, body: bytes) -> dict[str, str] | None:
        """Return the headers of its answer, None where it refuses."""
        lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
        lines += ["Connection: close", f"Content-Length: {len(body)}", "", ""]
        head, _, _ = self.exchange("\r\n".join(lines).encode("utf-8", "surrogateescape") + body).partition(b"\r\n\r\n")
        status, *found = head.decode().split("\r\n")
        if status.split(" ")[1:2] not in (["200"], ["204"]):
            return None
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in found)}

    def taken_for(self, target: str, fields: Fields, body: bytes) -> str | None:
        """Return the model that it passes a request to, "" where the activator decides, None where it refuses."""
        found = self.answered(target, fields, body)
        return None if found is None else found.get("x-model", "")

    def embedded(self, target: str, fields: Fields, body: bytes) -> str | None:
        """Return the model that the embedded plane passes such a request to, None where it passes it to none."""
        headers = CIMultiDict(fields)
        if mistake_in("POST", (1, 1), target, headers):
            return None
        path, _, query = target.partition("?")
        known = {name.lower(): value for name, value in fields}
        names = [name.lower() for name, _ in fields]
        named = query.partition("model=")[2]
        repeated = frozenset(name for name in names if names.count(name) > 1)
        head = Head("POST", known["host"], path, known, named, repeated)
        router = Router(self.settings)
        route = router.matching(head)
        decision = router.route(head, route, None, lambda name: Load(True, 0, 0, 0), 0.0)
        if isinstance(decision, NeedBody):
            scanner = fields_of(headers.get("content-type", ""), frozenset({"model"}))
            if scanner is not None:
                scanner.feed(body)
            name = scanner.found.get("model") if scanner is not None else None
            decision = router.route(
                head, route, name if isinstance(name, str) else "", lambda name: Load(True, 0, 0, 0), 0.0
            )
        return decision.model.name if isinstance(decision, ToModel) else None


@pytest.fixture(scope="module")
def haproxy() -> Iterator[Haproxy]:
    with tempfile.TemporaryDirectory(prefix="haproxy-") as state, Haproxy.running(Path(state), SETTINGS) as found:
        yield found


def name_of(haproxy: Haproxy, alias: str) -> str:
    return next((one.name for one in haproxy.settings.models if alias in (one.name, *one.aliases)), alias)


def agree(haproxy: Haproxy, target: str, fields: Fields, body: bytes) -> str | None:
    """Return what HAProxy takes a request for, which must be what the embedded plane takes it for, or left to that."""
    taken = haproxy.taken_for(target, fields, body)
    if taken:
        assert name_of(haproxy, taken) == haproxy.embedded(target, fields, body), (target, fields, body)
    return taken


DIRECT = {
    b'{"model":"one"}': "one", b'{"a":[{"model":"two"}],"model":"one"}': "one", b'{"model":"org/one"}': "org/one",
    b'{"a":"\\u00e9\\u001f\\n","model" : "two"}': "two", b'{"model":"one","model":"two"}': "one",
    b'{"messages":[{"content":"\\\\ \\" \\u20ac"}],"model":"one"}': "one", b'{"model":"true"}': "true",
}  # fmt: skip
LEFT = (
    b'{"mod\\u0065l":"one","model":"two"}', b'{"mod\\u0065l":"two"}', b'{"\\u006Dodel":"one","model":"two"}',
    b'{"model":"o\\u006ee"}', b'{"model":"one\\u0000"}', b'{"model":"one\\u0000x"}', b'{"model":7}',
    b'{"model":true}', b'{"model":"7"}', b'{"model":"o\\u00e9"}', b'{"model":"o\\u00c3\\u00a9"}', b"",
    b'{"model":"other"}', b'{"model":["one"]}', b'{"a":1}', b'{"model":"one\x00"}',
)  # fmt: skip


@pytest.mark.parametrize("body", DIRECT)
def test_plain_body_is_taken_for_its_model(haproxy: Haproxy, body: bytes) -> None:
    assert agree(haproxy, CHAT, (("Host", "h"), JSON), body) == DIRECT[body]


@pytest.mark.parametrize("body", LEFT)
def test_body_that_can_be_read_in_two_ways_is_left_to_the_embedded_plane(haproxy: Haproxy, body: bytes) -> None:
    assert agree(haproxy, CHAT, (("Host", "h"), JSON), body) == ""


TOKENS = st.sampled_from(
    [
        *(b'"model"', b'"model"', b'"mod\\u0065l"', b'"model\\u0000"', b'"m"', b'""', b'"Model"', b'"models"'),
        *(b'"one"', b'"two"', b'"o\\u006ee"', b'"one\\u0000"', b'"on\\/e"', b'"7"', b'"a\\"b"', b'"\\\\"', b'"\\x"'),
        *(b"{", b"}", b"[", b"]", b":", b":", b",", b",", b" ", b"\n", b"7", b"-1e5", b"true", b"null", b"NaN", b'"'),
        *(b"\\", b"\x00", b"\xef\xbb\xbf", b"\xff", b"/**/", b"'"),
    ]
)
VALUES = st.recursive(
    st.sampled_from(["one", "two", "7", "true", True, None, 7, 1.5, "one\x00", "é"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "m", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(TOKENS, max_size=14))
@example([b'"model"', b":", b'"one"', b",", b'"model"', b":", b'"two"'])
def test_any_body_is_taken_for_no_other_model(haproxy: Haproxy, tokens: list[bytes]) -> None:
    agree(haproxy, CHAT, (("Host", "h"), JSON), b"{" + b"".join(tokens))


@given(st.lists(st.tuples(st.sampled_from(["model", "mod\\u0065l", "m", "a"]), VALUES), max_size=5), st.booleans())
def test_json_is_taken_for_no_other_model(haproxy: Haproxy, pairs: list[tuple[str, object]], ascii: bool) -> None:
    body = "{" + ",".join(f'"{key}":{json.dumps(value, ensure_ascii=ascii)}' for key, value in pairs) + "}"
    agree(haproxy, CHAT, (("Host", "h"), JSON), body.encode())


def test_type_and_query_count_as_for_the_embedded_plane(haproxy: Haproxy) -> None:
    body, host = b'{"model":"one"}', ("Host", "h")
    for kind, taken in {
        "application/json": "one", "Application/JSON;charset=utf-8": "one", "application/x+json": "one",
        "application/json ;a": "", "text/json": "", "multipart/form-data; boundary=json": "", "application/jsonl": "",
        "text/html, application/json": "", "application/json, text/html": "", "text/plain": "",
    }.items():  # fmt: skip
        assert agree(haproxy, CHAT, (host, ("Content-Type", kind)), body) == taken, kind
    assert agree(haproxy, CHAT, (host, JSON, ("Content-Type", "text/html")), body) == ""
    for target, taken in {
        f"{CHAT}?model=two": "",
        f"{CHAT}?a=1": "one",
        "/v1/models": "",
        "/v1/models/one": "",
    }.items():
        assert agree(haproxy, target, (host, JSON), body) == taken, target


def test_header_counts_where_it_came_once_and_as_it_is(haproxy: Haproxy) -> None:
    host, body = ("Host", "h"), b'{"model":"one"}'
    for fields, taken in (
        ([("X-Team", "red")], "two"), ([("x-team", "red ")], "two"), ([("X-Team", "red"), ("X-Team", "red")], "one"),
        ([("X-Team", "red"), ("X-Team", "blue")], "one"), ([("X-Team", "blue"), ("X-Team", "red")], "one"),
        ([("X-Team", "blue, red")], "one"), ([("X_Team", "red")], "one"), ([("X-Team", "Red")], "one"),
    ):  # fmt: skip
        fields = [(name, value.strip()) for name, value in fields]
        assert agree(haproxy, "/team", (host, JSON, *fields), body) == taken, fields


def test_host_is_one(haproxy: Haproxy) -> None:
    body = b'{"model":"one"}'
    for target, hosts, taken in (
        (CHAT, ["h"], "one"), (CHAT, ["two.example"], "two"), (CHAT, ["TWO.example:8080"], "two"),
        (CHAT, ["h", "two.example"], None), (CHAT, ["h,two.example"], None), (CHAT, ["two.example h"], None),
        ("http://two.example/a", ["h"], None), ("http://h@two.example/a", ["h"], None), (CHAT, [], None),
    ):  # fmt: skip
        fields = [JSON, *(("Host", host) for host in hosts)]
        assert haproxy.taken_for(target, fields, body) == taken, (target, hosts)
        if taken is None and hosts:
            assert haproxy.embedded(target, fields, body) is None
    assert haproxy.taken_for("http://two.example/a", [JSON, ("Host", "two.example")], body) == "two"


def test_path_is_read_as_by_the_embedded_plane(haproxy: Haproxy) -> None:
    body, fields = b'{"model":"one"}', (("Host", "h"), JSON)
    for path in (*ODD_PATHS, "/v1#/a", "/a#", "http://h/a#b"):
        assert (haproxy.taken_for(path, fields, body), haproxy.embedded(path, fields, body)) == (None, None), path
    for path in PLAIN_PATHS:
        if path.isascii():
            assert agree(haproxy, path, fields, body) == ("two" if PLAIN_PATHS[path].name == "a" else "one"), path


def test_key_is_a_bearers_and_one(haproxy: Haproxy) -> None:
    for values, taken in (
        (["Bearer sk-a"], "two"), (["bearer  sk-a"], "two"), (["Basic sk-a"], ""), (["sk-a"], ""), (["x sk-a"], ""),
        (["Bearer sk-b"], ""), (["Bearer sk-a", "Bearer sk-b"], ""), (["Bearer sk-b", "Bearer sk-a"], ""), ([], ""),
    ):  # fmt: skip
        fields = [("Host", "h"), *(("Authorization", value) for value in values)]
        assert haproxy.taken_for("/keyed", fields, b"") == taken, values


def test_header_that_a_server_may_take_for_another_one_is_left_out(haproxy: Haproxy) -> None:
    odd = ["X_Forwarded_For", "X-Kybernate_Backend", "Content_Length", "Transfer_Encoding", "x_Api_Key", "X_Request-Id"]
    fields = [("Host", "h"), *((name, "1") for name in (*odd, "User_Id")), ("Authorization", "Bearer sk-a")]
    fields.append(("X-Api-Key", "sk-b"))
    found = haproxy.answered("/keyed", fields, b"")
    assert found is not None
    names = found["x-names"].split(",")
    assert "user_id" in names
    assert not {name.lower() for name in odd} & set(names)
    assert not {"authorization", "x-api-key"} & set(names)  # those that were looked at here


def test_names_that_servers_take_for_others_have_an_underscore() -> None:
    assert with_underscores({"x-a-b", "te"}) == ["x-a_b", "x_a-b", "x_a_b"]
