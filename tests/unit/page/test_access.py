"""Tickets are spent once, sessions cannot be forged, forms are of their own session."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.node.failure import Unavailable
from kybernate.page.access import TICKET_SECONDS, TICKETS, Access, Role, Session, key_of

KEY = b"k" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_ticket_is_spent_once() -> None:
    access = Access(KEY, Clock())
    ticket = access.ticket(Role.VIEWER)
    session = access.spend(ticket)
    assert session is not None
    assert session.role is Role.VIEWER
    assert access.spend(ticket) is None


def test_ticket_ends() -> None:
    clock = Clock()
    access = Access(KEY, clock)
    ticket = access.ticket(Role.OPERATOR)
    clock.now += TICKET_SECONDS + 1
    assert access.spend(ticket) is None


def test_tickets_are_bounded() -> None:
    access = Access(KEY, Clock())
    first = access.ticket(Role.VIEWER)
    others = [access.ticket(Role.VIEWER) for _ in range(TICKETS)]
    assert access.spend(first) is None
    assert access.spend(others[-1]) is not None


def test_session_ends() -> None:
    clock = Clock()
    access = Access(KEY, clock)
    cookie = access.cookie(Session(Role.OPERATOR, "id", 1500))
    assert access.session(cookie) == Session(Role.OPERATOR, "id", 1500)
    clock.now = 1501
    assert access.session(cookie) is None


@given(st.binary(max_size=300) | st.text(max_size=300))
def test_what_was_not_signed_is_no_session(sent: bytes | str) -> None:
    access = Access(KEY, Clock())
    cookie = sent if isinstance(sent, str) else base64.urlsafe_b64encode(sent).decode()
    assert access.session(cookie) is None


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_changed_cookie_is_no_session(place: int, change: int) -> None:
    access = Access(KEY, Clock())
    cookie = bytearray(base64.urlsafe_b64decode(access.cookie(Session(Role.VIEWER, "id", 9999))))
    cookie[place % len(cookie)] ^= change
    assert access.session(base64.urlsafe_b64encode(bytes(cookie)).decode()) is None


def test_another_key_has_other_sessions() -> None:
    cookie = Access(b"a" * 32, Clock()).cookie(Session(Role.OPERATOR, "id", 9999))
    assert Access(b"b" * 32, Clock()).session(cookie) is None


def test_proof_is_of_one_session_and_no_cookie() -> None:
    access = Access(KEY, Clock())
    one, other = Session(Role.OPERATOR, "one", 9999), Session(Role.OPERATOR, "other", 9999)
    assert access.proves(one, access.proof(one))
    assert not access.proves(other, access.proof(one))
    assert not access.proves(one, "")
    assert not access.proves(one, "\ud800")


def test_key_is_made_once_and_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "state/page.key"
    key = key_of(path)
    assert key_of(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(Unavailable, match="its owner alone"):
        key_of(path)


def test_key_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(KEY)
    (tmp_path / "page.key").symlink_to(tmp_path / "other")
    with pytest.raises(Unavailable, match="cannot be read"):
        key_of(tmp_path / "page.key")
