"""Who may use a route: keys, of which a file has the SHA-256, and how many requests each may make.

Keys are long and random, so a hash without salt says nothing of them; the file may be read by those who may read the
settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from kybernate.proxy.document import read_text, unusable

HASH: Final = re.compile(r"[0-9a-fA-F]{64}")
KEY_HEADERS: Final = frozenset({"authorization", "x-api-key", "api-key"})
MINUTE: Final = 60.0
MOST_CALLERS: Final = 1 << 16


def read_keys(path: Path) -> dict[str, str]:
    """Return the names of keys by their hashes: lines of `NAME HASH`, with comments after `#`.

    Raises Invalid.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not HASH.fullmatch(words[1]):
            raise unusable(f"{path}:{number}:1: must be NAME and the SHA-256 of a key in hexadecimal")
        found[words[1].lower()] = words[0]
    return found


def key_in(headers: Mapping[str, str]) -> str:
    """Return the key of a request, "" for none: a bearer's token, or the header that Anthropic's clients send."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "") or headers.get("api-key", "")


def owner_of(key: str, keys: Mapping[str, str]) -> str | None:
    """Return the name of a key, None for one that is unknown. Equal hashes are found, never compared byte by byte."""
    return keys.get(sha256(key.encode("utf-8", "surrogateescape")).hexdigest()) if key else None


class Quota:
    """Requests a minute, for each caller: a bucket that fills evenly and holds one minute's worth.

    It outlives the settings that it was used by: a caller has one bucket, however often they are read again.
    """

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # tokens, and when

    def take(self, caller: str, per_minute: int, now: float) -> float:
        """Count a request. Return 0 where it may pass, or the seconds until one may."""
        tokens, then = self._left.pop(caller, (float(per_minute), now))
        tokens = min(per_minute, tokens + (now - then) * per_minute / MINUTE)
        passes = tokens >= 1
        self._left[caller] = (tokens - 1 if passes else tokens, now)
        if len(self._left) > MOST_CALLERS:
            del self._left[next(iter(self._left))]
        return 0.0 if passes else (1 - tokens) * MINUTE / per_minute
