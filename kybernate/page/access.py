"""Who may look at the page and who may act: links that are valid once, and sessions that a cookie carries.

A link has a random ticket that only the page's process knows; it is spent by a POST, so that what looks at links in
messages does not spend it. A session is signed with a key of the page, and has a role, an id and an end. What a form
sends has the session's own proof, which another site cannot know.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kybernate.node.failure import Unavailable

TICKETS: Final = 1_000  # that are valid at a time; the oldest is dropped
TICKET_SECONDS: Final = 600.0
SESSION_SECONDS: Final = 12 * 3600.0
KEY_BYTES: Final = 32
COOKIE_CHARACTERS: Final = 512
ENDED: Final = 10_000  # sessions that were ended before their time; beyond it the oldest is forgotten


class Role(StrEnum):
    """A viewer sees the page; an operator has its buttons, too."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Session:
    """A browser that has logged in. `ends` is in seconds since 1970."""

    role: Role
    id: str
    ends: int


class Access:
    """Tickets and sessions; `now` is the time in seconds since 1970."""

    def __init__(self, key: bytes, now: Callable[[], float]) -> None:
        self._key, self._now = key, now
        self._ended: dict[str, None] = {}  # ids of sessions, oldest first
        self._tickets: dict[str, tuple[Role, float, float]] = {}  # by the hash of each: role, end, seconds of a session

    def ticket(self, role: Role, session_seconds: float = SESSION_SECONDS) -> str:
        """Return a new ticket, which makes one session of a role."""
        ticket = secrets.token_urlsafe(KEY_BYTES)
        while len(self._tickets) >= TICKETS:
            self._tickets.pop(next(iter(self._tickets)))
        self._tickets[_hash(ticket)] = (role, self._now() + TICKET_SECONDS, session_seconds)
        return ticket

    def spend(self, ticket: str) -> Session | None:
        """Return the session that a ticket makes; None where it is unknown, was spent, or has ended."""
        found = self._tickets.pop(_hash(ticket), None)
        if found is None or found[1] < self._now():
            return None
        return Session(found[0], secrets.token_hex(8), int(self._now() + found[2]))

    def cookie(self, session: Session) -> str:
        """Return the text by which a browser shows its session."""
        text = f"{session.role}.{session.id}.{session.ends}".encode()
        return base64.urlsafe_b64encode(text + b"." + self._sign(b"session", text)).decode()

    def session(self, cookie: str) -> Session | None:
        """Return the session of a cookie; None where it is not one of this page's, or has ended."""
        if len(cookie) > COOKIE_CHARACTERS:
            return None
        try:
            text, _, signature = base64.urlsafe_b64decode(cookie.encode()).rpartition(b".")
            if not hmac.compare_digest(signature, self._sign(b"session", text)):
                return None
        except (ValueError, binascii.Error):
            return None
        role, id, ends = text.decode().split(".")  # signed: it is what `cookie` has written
        session = Session(Role(role), id, int(ends))
        return session if self.lasts(session) else None

    def lasts(self, session: Session) -> bool:
        """Return whether a session has neither reached its time nor been ended."""
        return session.ends > self._now() and session.id not in self._ended

    def end(self, session: Session) -> None:
        """End a session before its time, also for others that have its cookie, as long as this process runs."""
        while len(self._ended) >= ENDED:
            self._ended.pop(next(iter(self._ended)))
        self._ended[session.id] = None

    def proof(self, session: Session) -> str:
        """Return what each form of a session sends, and what no other site knows."""
        return self._sign(b"form", session.id.encode()).decode()

    def proves(self, session: Session, proof: str) -> bool:
        """Return whether a form was made for this session."""
        return hmac.compare_digest(proof.encode("utf-8", "replace"), self.proof(session).encode())

    def _sign(self, purpose: bytes, text: bytes) -> bytes:
        return hmac.new(self._key, purpose + b"\0" + text, hashlib.sha256).hexdigest().encode()


def key_of(path: Path) -> bytes:
    """Return the key in a file, which is made where there is none. Raises Unavailable.

    Removing the file and restarting the page ends all sessions.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _new_key(path)
    except OSError as error:
        raise Unavailable(f"the page's key {path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        key = file.read(KEY_BYTES + 1)
    if status.st_mode & 0o077 or len(key) != KEY_BYTES:
        raise Unavailable(
            f"the page's key {path} is not {KEY_BYTES} bytes that its owner alone can read",
            advice="remove it: the page makes another one, and browsers have to log in again",
        )
    return key


def _new_key(path: Path) -> bytes:
    key, draft = secrets.token_bytes(KEY_BYTES), path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError as error:
        raise Unavailable(f"the page's key {path} cannot be written: {error.strerror}") from error
    return key


def _hash(ticket: str) -> str:
    return hashlib.sha256(ticket.encode("utf-8", "replace")).hexdigest()
