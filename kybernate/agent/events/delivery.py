"""What a webhook's request says, and what its answer means. Pure.

The signature is over the time and the body, so that neither can be replaced: a receiver computes
HMAC-SHA-256(secret, "TIME.BODY"), compares it with `v1`, and refuses a time that is long past.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum

from kybernate.messages import agent_pb2 as api

SIGNATURE = "Kybernate-Signature"
DELIVERY = "Kybernate-Delivery"
TYPE = "Kybernate-Event"
FIRST_SECONDS, LONGEST_SECONDS = 1.0, 300.0
LONGEST_WISH = 3600.0  # of a Retry-After
OF_THE_EVENT = frozenset({400, 406, 409, 411, 412, 413, 415, 422})  # answers that no repetition changes


class Verdict(Enum):
    """What an answer means for a delivery."""

    DONE = "done"
    AGAIN = "again"
    REFUSED = "refused"  # the event itself; repeated a few times only, since others wait behind it


def verdict_of(status: int) -> Verdict:
    """Return what a status means. A redirect is not followed, so it is no delivery."""
    if 200 <= status < 300:
        return Verdict.DONE
    return Verdict.REFUSED if status in OF_THE_EVENT else Verdict.AGAIN


def body_of(event: api.Event, node: str) -> bytes:
    """Return the request's body: the event as JSON, with the node's name."""
    names = ("id", "type", "level", "message", "container", "namespace", "operation", "image")
    document = {name: getattr(event, name) for name in names}
    document |= {"node": node, "time": event.time.ToJsonString(), "fields": dict(sorted(event.fields.items()))}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def delivery_id(event: api.Event, url: str, node: str) -> str:
    """Return an id that is the same for each repetition of a delivery, also after a restart."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{url}#{node}#{event.id}#{event.time.ToNanoseconds()}"))


def signature_of(body: bytes, secret: bytes, seconds: int) -> str:
    """Return the header that proves who sent `body` at `seconds` since the epoch."""
    mac = hmac.new(secret, b"%d.%b" % (seconds, body), hashlib.sha256).hexdigest()
    return f"t={seconds},v1={mac}"


def pause_before(attempt: int, wish: float, chance: Callable[[], float]) -> float:
    """Return the seconds before attempt 1, 2, …: doubled each time, half of it by `chance` (0 to 1), no less than a
    receiver's `wish`."""
    pause = min(FIRST_SECONDS * 2.0 ** min(attempt - 1, 30), LONGEST_SECONDS)
    return max(pause * (0.5 + chance() / 2), wish)


def wish_of(retry_after: str, now: datetime) -> float:
    """Return the seconds that a Retry-After asks for, at most an hour; 0 where it says nothing that can be read."""
    try:
        if retry_after.strip().isascii() and retry_after.strip().isdigit():
            seconds = float(min(int(retry_after[:20]), int(LONGEST_WISH)))
        else:
            date = parsedate_to_datetime(retry_after)
            seconds = (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds()
    except (ValueError, OverflowError, IndexError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WISH)
