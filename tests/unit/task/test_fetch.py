"""What a shim does with an image that is not on its node, by what the node's agent answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kybernate.agent.service.for_shims import Described
from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate_shim.checkpoint.image.requested import Wanted
from kybernate_shim.messages import fetch_pb2 as wire
from kybernate_shim.task import fetch as module
from kybernate_shim.task.fetch import SERVICE, ImageNotFetched, container_image, fetch, related
from kybernate_shim.trust.requester import Requester
from kybernate_shim.ttrpc import Call, Code, Method, RpcError, Server

POD = Requester("tenant", "team-a", "web")
WANTED = Wanted("before-upgrade", "annotation x")
Answer = Callable[[wire.FetchRequest, Call], Awaitable[wire.FetchResponse]]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "images.sock"
    monkeypatch.setattr(module, "IMAGES_SOCKET", path)
    return path


def asked(path: Path, answer: Answer, wanted: Wanted = WANTED) -> bool:
    async def scenario() -> bool:
        server = Server({SERVICE: {"Fetch": Method(wire.FetchRequest, answer, cancellable=True)}})
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        await server.start(listener)
        try:
            return await fetch(wanted, POD, "c1")
        finally:
            await server.close(grace=0)

    return asyncio.run(scenario())


def test_agent_is_asked_for_the_pods_own_namespace(path: Path) -> None:
    requests: list[wire.FetchRequest] = []

    async def answer(request: wire.FetchRequest, call: Call) -> wire.FetchResponse:
        requests.append(request)
        return wire.FetchResponse(path="/anywhere")

    assert asked(path, answer)
    (request,) = requests
    assert (request.namespace, request.name, request.container) == ("team-a", "before-upgrade", "c1")


@pytest.mark.parametrize("name", ["../other/image", "/path", "a//b", ""])
def test_what_is_no_name_is_not_asked_for(path: Path, name: str) -> None:
    async def answer(request: wire.FetchRequest, call: Call) -> wire.FetchResponse:
        raise AssertionError(request)

    assert not asked(path, answer, Wanted(name, "annotation x"))


def test_node_without_an_agent_has_no_more_images(path: Path) -> None:
    assert not asyncio.run(fetch(WANTED, POD, "c1"))


def test_image_that_no_tier_has_stays_missing(path: Path) -> None:
    async def answer(request: wire.FetchRequest, call: Call) -> wire.FetchResponse:
        raise RpcError(Code.NOT_FOUND, "no tier has it")

    assert not asked(path, answer)


def test_refusal_is_passed_on(path: Path) -> None:
    async def answer(request: wire.FetchRequest, call: Call) -> wire.FetchResponse:
        raise RpcError(Code.FAILED_PRECONDITION, "no room")

    with pytest.raises(ImageNotFetched, match=r"annotation x: the node's agent: no room\. Nothing was restored"):
        asked(path, answer)


def test_agent_that_is_slow_does_not_hold_up_the_client(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.05)

    async def answer(request: wire.FetchRequest, call: Call) -> wire.FetchResponse:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ImageNotFetched, match="has not fetched the part of before-upgrade"):
        asked(path, answer)


# ---- which container image a container was made of


def answered(path: Path, services: Mapping[str, Any]) -> str:
    """Return what a shim gets to know from an agent with these services."""

    async def scenario() -> str:
        server = Server(services)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        await server.start(listener)
        try:
            return await container_image("k8s.io", "c1")
        finally:
            await server.close(grace=0)

    return asyncio.run(scenario())


def described(path: Path, image_of: Callable[[str, str], Awaitable[tuple[str, str]]]) -> str:
    return answered(path, {SERVICE: Described(image_of).methods()})


def test_agent_knows_the_digest_of_a_containers_image(path: Path) -> None:
    async def image_of(namespace: str, id: str) -> tuple[str, str]:
        assert (namespace, id) == ("k8s.io", "c1")
        return "web:1", "sha256:aa"

    assert described(path, image_of) == "sha256:aa"


@pytest.mark.parametrize("failure", [None, ContainerdUnreachable("away"), ContainerdRefused("no", code="INTERNAL")])
def test_digest_that_cannot_be_known_is_none(path: Path, failure: Exception | None) -> None:
    async def image_of(namespace: str, id: str) -> tuple[str, str]:
        if failure is not None:
            raise failure
        return "", ""

    assert described(path, image_of) == ""


def test_node_without_an_agent_knows_no_digest(path: Path) -> None:
    assert asyncio.run(container_image("k8s.io", "c1")) == ""


def test_agent_of_an_older_release_knows_no_digest(path: Path) -> None:
    assert answered(path, {SERVICE: {}}) == ""


def told(path: Path, answer: Callable[[wire.RelatedRequest, Call], Awaitable[wire.RelatedResponse]]) -> Any:
    async def scenario() -> Any:
        server = Server({SERVICE: {"Related": Method(wire.RelatedRequest, answer, cancellable=True)}})
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        await server.start(listener)
        try:
            return await related(POD, "first", ["uid-1", ""])
        finally:
            await server.close(grace=0)

    return asyncio.run(scenario())


def test_agent_says_which_images_are_elsewhere(path: Path) -> None:
    requests: list[wire.RelatedRequest] = []
    image = wire.RelatedImage(name="first", id="a", time="2026-01-02T03:00:00+00:00", container="c0", origin="c0")

    async def answer(request: wire.RelatedRequest, call: Call) -> wire.RelatedResponse:
        requests.append(request)
        return wire.RelatedResponse(images=[image])

    (found,) = told(path, answer)
    assert (found.name, found.id, found.origin, found.time.isoformat()) == ("first", "a", "c0", image.time)
    (request,) = requests
    assert (request.namespace, request.name, list(request.words)) == ("team-a", "first", ["uid-1"])


def test_agent_that_knows_no_lineages_has_no_images_elsewhere(path: Path) -> None:
    async def older(request: wire.RelatedRequest, call: Call) -> wire.RelatedResponse:
        raise RpcError(Code.UNIMPLEMENTED, "no such method")

    assert told(path, older) == ()
    path.unlink()
    assert asyncio.run(related(POD, "", [])) == ()


def test_agent_that_cannot_say_which_images_are_elsewhere_is_no_reason_to_take_another(path: Path) -> None:
    async def refuses(request: wire.RelatedRequest, call: Call) -> wire.RelatedResponse:
        raise RpcError(Code.UNAVAILABLE, "the registry does not answer")

    with pytest.raises(ImageNotFetched, match=r"the registry does not answer.*Nothing was restored"):
        told(path, refuses)
