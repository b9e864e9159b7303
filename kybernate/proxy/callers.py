"""Whether a caller may use a route, whichever door his request came by: his key, and his part of the route's quota."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.engine import Refused
from kybernate.proxy.keys import Quota, key_in, owner_of
from kybernate.proxy.record import Record
from kybernate.proxy.settings import Route


class Callers:
    """`keys` are those of the routes' files: names by hashes, by path. `quota` has what was counted until now."""

    def __init__(self, routes: Sequence[Route], keys: Mapping[str, Mapping[str, str]], quota: Quota) -> None:
        self._keys, self._quota = keys, quota
        self._names = {id(route): name_of(route) for route in routes if route.quota}

    def require_key(self, record: Record, route: Route | None) -> None:
        """Find whose key a request has. Raises Refused for a missing or unknown one where the route asks for one."""
        if route is None or route.keys is None:
            return
        owner = owner_of(key_in(record.head.headers), self._keys[str(route.keys)])
        if owner is None:
            raise Refused(Refusal(401, "invalid_api_key", "the key is missing or unknown"))
        record.owner = owner

    def require_quota(self, record: Record, route: Route | None) -> None:
        """Count a request. Raises Refused for one over the quota."""
        if route is None or not route.quota:
            return
        caller = f"{self._names[id(route)]} {record.owner or record.client}"
        if seconds := self._quota.take(caller, route.quota, time.monotonic()):
            words = f"more than {route.quota} requests a minute"
            raise Refused(Refusal(429, "rate_limit_exceeded", words, seconds))


def name_of(route: Route) -> str:
    """Return what a route is known by when the settings are read again: all of it but how many requests it allows."""
    return repr((route.hosts, route.paths, sorted(route.headers.items()), route.to, str(route.keys or "")))
