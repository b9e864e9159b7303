"""Tokens of pages: where a list continues, and which list that is. They are opaque, and checked when they come back."""

from __future__ import annotations

import base64
import json
from dataclasses import astuple, dataclass
from hashlib import sha256

from kybernate.node.failure import Invalid
from kybernate.registry.model import Filter
from kybernate_shim import bounded_json

FORM = 1
CHECK = 12  # digits
LONGEST = 400


@dataclass(frozen=True)
class Position:
    """The last image of a page: images after it are older, or as old with a smaller key."""

    created: int
    key: str


def token_of(position: Position, wanted: Filter) -> str:
    """Return the token of the page after `position`."""
    body = json.dumps([FORM, position.created, position.key])
    return base64.urlsafe_b64encode(f"{_check(body, wanted)}{body}".encode()).decode().rstrip("=")


def position_of(token: str, wanted: Filter) -> Position | None:
    """Return where the page begins, None for the first one. Raises Invalid."""
    if not token:
        return None
    try:
        if len(token) > LONGEST:
            raise ValueError
        text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
        check, body = text[:CHECK], text[CHECK:]
        if check != _check(body, wanted):
            raise ValueError
        form, created, key = bounded_json.parse(body)
        if form != FORM or not isinstance(created, int) or not isinstance(key, str):
            raise ValueError
    except (ValueError, TypeError) as error:
        raise Invalid("the page token is not one of this list", advice="begin with the first page") from error
    return Position(created, key)


def _check(body: str, wanted: Filter) -> str:
    """Return what binds a token to its list; it finds mistakes, and keeps no secret."""
    *texts, labels, pinned = astuple(wanted)
    filter = json.dumps([texts, sorted(labels.items()), pinned])
    return sha256(f"kybernate page {filter} {body}".encode()).hexdigest()[:CHECK]
