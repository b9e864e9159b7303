"""The small pure parts: headers, keys, quotas, filters, and the list of models."""

from __future__ import annotations

import json
from hashlib import sha256
from ipaddress import ip_network
from pathlib import Path

import pytest
from multidict import CIMultiDict

from kybernate.node.failure import Invalid
from kybernate.proxy.embedded import headers
from kybernate.proxy.filters import filtered
from kybernate.proxy.keys import Quota, key_in, owner_of, read_keys
from kybernate.proxy.settings import Filters


def test_headers_that_connection_names_are_left_out() -> None:
    given = CIMultiDict(
        [("Connection", "X-A , close"), ("X-A", "1"), ("x-b", "2"), ("Set-Cookie", "a"), ("Set-Cookie", "b")]
    )
    assert list(headers.passed_on(given).items()) == [("x-b", "2"), ("Set-Cookie", "a"), ("Set-Cookie", "b")]


@pytest.mark.parametrize(
    "name",
    [
        "X_Forwarded_For",
        "x_forwarded-for",
        "X-Kybernate_Backend",
        "Content_Length",
        "Transfer_Encoding",
        "X_A",
        "x_Api_Key",
    ],
)
def test_header_that_a_server_may_take_for_another_one_is_left_out(name: str) -> None:
    given = CIMultiDict([("Connection", "X-A"), (name, "1"), ("User_Id", "2")])
    found = headers.for_upstream(
        given, client="", scheme="http", request_id="i", trusted=True, drop=frozenset({"x-api-key"})
    )
    assert name not in found
    assert found["User_Id"] == "2"


@pytest.mark.parametrize(
    ("target", "host", "reason"),
    [
        ("http://h/a", "h", None), ("http://H:80/a", "h", None), ("https://h:443", "h", None),
        ("http://h?a", "h", None),
        ("http://evil/a", "h", "bad_host"), ("http://evil/@h", "h", "bad_host"), ("http://h:81/a", "h", "bad_host"),
        ("http://user@h/a", "h", "bad_host"), ("http://evil\\@h/a", "h", "bad_host"),
        ("https://h:80/a", "h", "bad_host"),
        ("/a", "h,evil", "bad_host"), ("/a", "h'", "bad_host"), ("*a", "h", "bad_method"), ("*", "h", "bad_method"),
        ("//evil/a", "h", None), ("h", "h", "bad_method"), ("ftp://h/a", "h", "bad_method"),
        ("/a#/../b", "h", "bad_method"), ("http://h/a#b", "h", "bad_method"),
    ],
)  # fmt: skip
def test_target_is_of_the_host_that_routes_look_at(target: str, host: str, reason: str | None) -> None:
    mistake = headers.mistake_in("GET", (1, 1), target, CIMultiDict({"Host": host}))
    assert (mistake and mistake.reason) == reason


def test_all_of_a_server_is_asked_for_by_options_alone() -> None:
    assert headers.mistake_in("OPTIONS", (1, 1), "*", CIMultiDict({"Host": "h"})) is None


def test_mapped_address_of_ipv4_is_trusted_like_itself() -> None:
    networks = [ip_network("10.0.0.0/8"), ip_network("fd00::/8")]
    for address, known in (
        ("::ffff:10.1.2.3", True),
        ("10.1.2.3", True),
        ("fd00::1", True),
        ("::ffff:11.0.0.1", False),
    ):
        assert headers.is_trusted(address, networks) is known
    assert not headers.is_trusted("10.1.2.3", [])


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"x-stainless-read-timeout": "600"}, 600.0), ({"prefer": "respond-async, wait=5"}, 5.0),
        ({"x-request-timeout": "0.5"}, 0.5), ({"x-request-timeout": "0"}, None), ({"x-request-timeout": "-1"}, None),
        ({"x-request-timeout": "nan"}, None), ({}, None), ({"prefer": "wait=x"}, None),
    ],
)  # fmt: skip
def test_client_says_how_long_it_waits(given: dict[str, str], seconds: float | None) -> None:
    assert headers.seconds_of_client(given) == seconds


def test_key_is_known_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n\nalice {sha256(b'sk-a').hexdigest().upper()} # hers\n")
    keys = read_keys(path)
    assert owner_of(key_in({"authorization": "Bearer sk-a"}), keys) == "alice"
    assert owner_of(key_in({"x-api-key": "sk-a"}), keys) == "alice"
    assert owner_of(key_in({"authorization": "Basic sk-a"}), keys) is None
    assert owner_of("", keys) is None
    path.write_text("alice sk-a\n")
    with pytest.raises(Invalid, match=r"keys:1:1: must be NAME"):
        read_keys(path)


def test_quota_fills_evenly() -> None:
    quota = Quota()
    assert [quota.take("a", 2, 0.0) for _ in range(3)] == [0.0, 0.0, 30.0]
    assert quota.take("b", 2, 0.0) == 0.0
    assert quota.take("a", 2, 30.0) == 0.0
    assert quota.take("a", 2, 31.0) == pytest.approx(29.0)


def test_filters_change_only_what_they_name() -> None:
    body = json.dumps({"model": "x", "seed": 1, "n": 3, "text": "é\ud800"}).encode()
    found = json.loads(filtered(body, Filters({"n": 1, "k": 2}, ("seed",), {"stop": None}), "real"))
    assert found == {"model": "real", "n": 3, "k": 2, "text": "é\ud800", "stop": None}
    for bad in (b"[]", b"{", b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            filtered(bad, Filters())
