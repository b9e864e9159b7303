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


def test_header_that_came_twice_meets_no_route() -> None:
    """Which of the two a server looks at is unknown."""
    found = router(routes=(Route(headers={"x-team": "red"}, to="a"), Route(to="b")))
    for head, target in (
        (Head("POST", "h", "/", {"x-team": "red"}), A),
        (Head("POST", "h", "/", {"x-team": "red"}, repeated=frozenset({"x-team"})), B),
        (Head("POST", "h", "/", {"x-team": "red"}, repeated=frozenset({"x-other"})), A),
    ):
        assert found.route(head, found.matching(head), None, lambda name: FREE, 0.0) == ToModel(target)


ODD_PATHS = (
    "/open/../v1/a", "/open/%2e%2e/v1/a", "/open/.%2E/v1/a", "/open/..%2fv1", "/open/./a", "/v1/..", "/.", "/%2e",
    "//v1/a", "/open//a", "/open%2f%2fa", "/v1;x/a", "/v1%3bx/a", "/open/..;/v1", "/open\\..\\v1", "/open%5c..%5cv1",
    "/v1/%", "/v1/%a", "/v1/%zz", "/v1/%0g", "/v1/%00", "/v1/%0a", "/v1/%7f",
)  # fmt: skip
PLAIN_PATHS = {
    "/v1/a": A, "/v1": A, "/%761/%61": A, "/v1%2fa": A, "/%2576": B, "/v10": B, "/v1.": B, "/open/.../a": B, "/.v1": B,
    "/v1/org%2Fname": A, "/v1/a.b": A, "/v1/%C3%A9": A, "/v1/\udcff": A, "/v1/a:b@c+d~,=": A,
}  # fmt: skip


def test_path_meets_the_route_that_the_model_reads_in_it() -> None:
    found = router(routes=(Route(paths=("/v1",), to="a"), Route(to="b")))
    for path, target in PLAIN_PATHS.items():
        head = Head("POST", "h", path, {})
        assert found.route(head, found.matching(head), None, lambda name: FREE, 0.0) == ToModel(target), path


def test_path_that_servers_read_in_different_ways_meets_no_route() -> None:
    found = router(routes=(Route(paths=("/v1",), to="a"), Route(to="b")))
    for path in ODD_PATHS:
        head = Head("POST", "h", path, {})
        decision = found.route(head, found.matching(head), None, lambda name: FREE, 0.0)
        assert isinstance(decision, Refusal), path
        assert (decision.status, decision.reason) == (400, "bad_path")


def test_paths_do_not_matter_where_no_route_has_one() -> None:
    found = router(routes=(Route(to="b"),))
    for path in ODD_PATHS:
        head = Head("POST", "h", path, {})
        assert found.route(head, found.matching(head), None, lambda name: FREE, 0.0) == ToModel(B)
