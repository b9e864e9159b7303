"""Which model a request is for: a pure function of its head, the fields of its body, and how busy the models are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.settings import Model, Peer, Probe, Route, Selector, Settings

BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})
# Paths that servers read in several ways: as they are written, and once they are decoded. Parts of both are left out by
# some: dot segments, empty segments, parameters; others take a backslash for a slash.
ODD_AS_WRITTEN: Final = r"%([^0-9A-Fa-f]|.[^0-9A-Fa-f]|.?$)|%00"
ODD_DECODED: Final = r"(^|/)[.][.]?(/|$)|//|[\\;[:cntrl:]]"
ODD: Final = re.compile(ODD_AS_WRITTEN), re.compile(ODD_DECODED.replace("[:cntrl:]", r"\x00-\x1f\x7f"))


@dataclass(frozen=True)
class Head:
    """What is known of a request before its body. `path` is without the query, names of `headers` are lower case.

    Of a header in `repeated`, which came several times, `headers` has the last one; no route is met by it.
    """

    method: str
    host: str
    path: str
    headers: Mapping[str, str]
    model_in_query: str = ""
    repeated: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Load:
    """How a model is: whether it is awake, the requests that it has and that wait, and how many it takes (0: any)."""

    awake: bool
    in_flight: int
    waiting: int
    concurrency: int
    crowded: bool = False  # it could wake only if another one left that has requests

    @property
    def busy(self) -> bool:
        return self.crowded or self.waiting > 0 or 0 < self.concurrency <= self.in_flight


@dataclass(frozen=True)
class ToModel:
    """Pass it to a model."""

    model: Model


@dataclass(frozen=True)
class ToPeer:
    """Pass it to another host."""

    peer: Peer


@dataclass(frozen=True)
class ListModels:
    """Answer with the list of models, or with the one that is named."""

    name: str = ""


@dataclass(frozen=True)
class NeedBody:
    """The model is named in the body."""


Decision = ToModel | ToPeer | ListModels | NeedBody | Refusal
Loads = Callable[[str], Load]


class Router:
    """The routes of some settings, prepared for look-ups."""

    def __init__(self, settings: Settings) -> None:
        self._routes = settings.routes
        self._by_path = any(route.paths for route in settings.routes)
        self._targets: dict[str, Model | Peer | Selector] = {}
        for model in settings.models:
            self._targets |= dict.fromkeys((model.name, *model.aliases), model)
        self._targets |= {one.name: one for one in settings.selectors}
        self._elsewhere: dict[str, Peer] = {}  # who has a model of this node as well
        for peer in settings.peers:
            for name in peer.models:
                here = isinstance(self._targets.get(name), Model)
                (self._elsewhere if here else self._targets)[name] = peer

    def matching(self, head: Head) -> Route | None:
        """Return the first route that a request meets; none where paths count, and servers read its own differently."""
        if self._by_path and is_odd(head.path):
            return None
        path = unquote(head.path, errors="surrogateescape")  # as models' servers read it
        return next((route for route in self._routes if _meets(head, path, route)), None)

    def route(self, head: Head, route: Route | None, model: str | None, loads: Loads, draw: float) -> Decision:
        """Decide about a request that meets `route`.

        `model` is the one that its body names: None while the body was not read, "" where it names none. `draw` is a
        random number from 0 to 1, by which weights choose.
        """
        if route is None and self._by_path and is_odd(head.path):
            return Refusal(400, "bad_path", "servers read this path in different ways")
        if route is None:
            return Refusal(404, "no_route", f"no route for {head.host}{head.path}")
        if route.to:
            return self._to(route.to, loads, draw)
        if head.path == "/v1/models" or head.path.startswith("/v1/models/"):
            return ListModels(head.path.removeprefix("/v1/models").strip("/"))
        name = head.model_in_query or model
        if name is None:
            if head.method in BODY_METHODS:
                return NeedBody()
            return Refusal(404, "no_route", f"{head.method} {head.path} names no model and has no route of its own")
        if not name:
            return Refusal(400, "model_missing", "the request names no model: its body needs the field `model`")
        return self._to(name, loads, draw)

    def _to(self, name: str, loads: Loads, draw: float) -> Decision:
        target = self._targets.get(name)
        if isinstance(target, Selector):
            target = self._targets[_choose(target, loads, draw)]
        if isinstance(target, Model):
            peer = self._elsewhere.get(name)
            return ToPeer(peer) if peer is not None and loads(target.name).crowded else ToModel(target)
        if isinstance(target, Peer):
            return ToPeer(target)
        return Refusal(404, "model_not_found", f"the model `{name}` does not exist")


def probe_for(head: Head, model: Model) -> Probe | None:
    """Return the probe that a request is, whose model is not awake: it neither wakes the model nor is it activity."""
    return next((one for one in model.probes if one.path == head.path and head.method in ("GET", "HEAD")), None)


def is_odd(path: str) -> bool:
    """Return whether servers read a path in different ways."""
    return bool(ODD[0].search(path) or ODD[1].search(unquote(path, errors="surrogateescape")))


def _meets(head: Head, path: str, route: Route) -> bool:
    return (
        (not route.hosts or head.host in route.hosts)
        and (not route.paths or any(below(path, top) for top in route.paths))
        and all(head.headers.get(name) == value for name, value in route.headers.items())
        and head.repeated.isdisjoint(route.headers)
    )


def below(path: str, top: str) -> bool:
    """Return whether a path is `top` or below it: /v1 has /v1/models and not /v10."""
    return path == top or path.startswith(top if top.endswith("/") else top + "/")


def _choose(selector: Selector, loads: Loads, draw: float) -> str:
    """Return the model that a selector stands for now. A model of a peer is always awake and never busy."""
    match selector.choose:
        case "warm":
            awake = [name for name in selector.of if loads(name).awake]
            return next((name for name in awake if not loads(name).busy), (awake or selector.of)[0])
        case "spillover":
            return next((name for name in selector.of if not loads(name).busy), selector.of[0])
    at = draw * sum(selector.weights)
    for name, weight in zip(selector.of, selector.weights, strict=True):
        at -= weight
        if at < 0:
            return name
    return next(name for name, weight in zip(selector.of, selector.weights, strict=True) if weight)
