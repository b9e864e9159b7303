"""Routes decide by head, body and load; nothing else."""

from __future__ import annotations

from kybernate.proxy.api_errors import Refusal, api_of, body_of, event_of
from kybernate.proxy.routing import Head, ListModels, Load, NeedBody, Router, ToModel, ToPeer
from kybernate.proxy.settings import Model, Peer, Route, Selector, Settings

A, B = Model("a", "http://a", aliases=("x",)), Model("b", "http://b")
FAR = Peer("far", "https://far", ("p",))
FREE, BUSY, COLD = Load(True, 0, 0, 1), Load(True, 1, 0, 1), Load(False, 0, 0, 1)


def router(*selectors: Selector, routes: tuple[Route, ...] = (Route(),)) -> Router:
    return Router(Settings(models=(A, B), selectors=selectors, peers=(FAR,), routes=routes))


def decided(model: str | None, loads: dict[str, Load] | None = None, *selectors: Selector, draw: float = 0.0) -> object:
    head = Head("POST", "h", "/v1/chat/completions", {})
    found = router(*selectors)
    known = loads or {}
    return found.route(head, found.matching(head), model, lambda name: known.get(name, FREE), draw)


def test_body_is_asked_for_once_nothing_else_names_the_model() -> None:
    assert decided(None) == NeedBody()
    assert decided("x") == ToModel(A)
    assert decided("p") == ToPeer(FAR)
    assert isinstance(decided(""), Refusal)


def test_warm_prefers_awake_then_free_then_the_first() -> None:
    warm = Selector("s", "warm", ("a", "b"))
    assert decided("s", {"a": COLD, "b": FREE}, warm) == ToModel(B)
    assert decided("s", {"a": BUSY, "b": FREE}, warm) == ToModel(B)
    assert decided("s", {"a": BUSY, "b": COLD}, warm) == ToModel(A)
    assert decided("s", {"a": COLD, "b": COLD}, warm) == ToModel(A)


def test_spillover_takes_the_first_that_is_free() -> None:
    spill = Selector("s", "spillover", ("a", "b", "p"))
    assert decided("s", {"a": BUSY, "b": FREE}, spill) == ToModel(B)
    assert decided("s", {"a": BUSY, "b": BUSY, "p": FREE}, spill) == ToPeer(FAR)


def test_weights_divide_the_draws() -> None:
    weights = Selector("s", "weights", ("a", "b"), (3, 1))
    draws = [decided("s", {}, weights, draw=number / 100) for number in range(100)]
    assert (draws.count(ToModel(A)), draws.count(ToModel(B))) == (75, 25)


def test_first_route_that_is_met_counts() -> None:
    routes = (Route(hosts=("n",), paths=("/lab",), headers={"t": "1"}, to="a"), Route(paths=("/v1",)))
    found = router(routes=routes)
    meets = Head("GET", "n", "/lab/x", {"t": "1"})
    assert found.matching(meets) == routes[0]
    assert found.matching(Head("GET", "n", "/lab", {})) is None
    assert found.matching(Head("GET", "z", "/v1/models", {})) == routes[1]
    assert found.route(Head("GET", "z", "/v1/models", {}), routes[1], None, lambda _: FREE, 0) == ListModels()
    assert found.matching(Head("GET", "z", "/v10", {})) is None


def test_errors_are_in_the_form_of_their_api() -> None:
    refusal = Refusal(503, "wake_failed", "no room", 2.2)
    assert refusal.headers == {"Retry-After": "3"}
    assert api_of("/v1/messages/count_tokens") == "anthropic"
    assert body_of(refusal, "openai", "1")[0] == (
        b'{"error": {"message": "no room", "type": "server_error", "param": null, "code": "wake_failed"}}'
    )
    assert event_of(refusal, "anthropic", "1").startswith(b"event: error\ndata: {")
    assert body_of(refusal, "", "1") == (b"no room\n", "text/plain; charset=utf-8")
