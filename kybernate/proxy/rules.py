"""Routes, selectors, peers and keys: what requests are decided by, and what changes while the proxy runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from kybernate.proxy.callers import Callers
from kybernate.proxy.document import read_text, unusable
from kybernate.proxy.keys import Quota, read_keys
from kybernate.proxy.routing import Router
from kybernate.proxy.settings import Settings

CHANGEABLE: Final = ("routes", "selectors", "peers")


class Rules:
    """Those of some settings, with the files that they name. What was decided by earlier ones stays as it is."""

    router: Router
    callers: Callers
    peer_keys: Mapping[str, str]

    def __init__(self, settings: Settings) -> None:
        self.settings, self._quota = settings, Quota()
        self._take(settings)

    def require_changeable(self, settings: Settings) -> None:
        """Raises Invalid where settings differ in more than may change."""
        before = self.settings
        names = [one.name for one in fields(Settings) if one.name not in CHANGEABLE]
        if fixed := [name for name in names if getattr(before, name) != getattr(settings, name)]:
            raise unusable(
                f"{', '.join(fixed)} cannot change while the proxy runs",
                state="the proxy keeps the settings that it has",
                advice="restart it; with HAProxy, streams of awake models continue",
            )

    def change(self, settings: Settings) -> None:
        """Decide by others from now on. Raises Invalid; then nothing has changed."""
        self.require_changeable(settings)
        self._take(settings)

    def _take(self, settings: Settings) -> None:
        keys = {str(route.keys): read_keys(route.keys) for route in settings.routes if route.keys}
        callers = Callers(settings.routes, keys, self._quota)
        peer_keys = {one.name: read_text(one.key_file).strip() for one in settings.peers if one.key_file}
        self.settings, self.router = settings, Router(settings)
        self.callers, self.peer_keys = callers, peer_keys
