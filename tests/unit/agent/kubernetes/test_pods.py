"""The node's pods are followed over every end of a watch, and only what matters of them is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.kubernetes.access import Access
from kybernate.agent.kubernetes.api import Api
from kybernate.agent.kubernetes.pods import FIRST_PAUSE, Pod, Pods, pod_of
from kybernate.agent.kubernetes.story import Subject
from kybernate.verbs.probes import LIVENESS, STARTUP, ProbeLimit, limit_by_probes
from tests.fakes.api_server import ApiServer, a_pod, api_server

NOTHING = st.none() | st.integers() | st.text(max_size=3)
JSON = st.recursive(NOTHING, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner))


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not look():  # noqa: ASYNC110  # of a thread, which sets no event
            await asyncio.sleep(0.002)


class Following:
    """The pods of node-1, and what was said of them."""

    def __init__(self, server: ApiServer) -> None:
        self.changed: list[Pod] = []
        self.gone = 0
        self.paused: list[float] = []
        self.log = structlog.testing.LogCapture()
        log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[self.log])
        self.api = Api(Access(server.url))
        self.pods = Pods(self.api, "node-1", log, self.changed.append, self._gone, pauses=self._pauses)

    def _gone(self) -> None:
        self.gone += 1

    async def _pauses(self, seconds: float) -> None:
        self.paused.append(seconds)

    @property
    def names(self) -> list[str]:
        return [pod.name for pod in self.changed]


def followed(
    prepare: Callable[[ApiServer], object], work: Callable[[ApiServer, Following], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        with api_server() as server:
            prepare(server)
            there = Following(server)
            task = asyncio.create_task(there.pods.run())
            try:
                await work(server, there)
            finally:
                task.cancel()
                await asyncio.wait({task})
                await there.api.close()

    asyncio.run(run())


def two(server: ApiServer) -> None:
    server.pods = [a_pod("a", "u-1"), a_pod("b", "u-2", checkpoint="x")]


def test_pods_are_listed_in_pages_and_then_followed() -> None:
    async def work(server: ApiServer, there: Following) -> None:
        await until(lambda: there.names == ["a", "b"])
        server.change("MODIFIED", a_pod("a", "u-1", checkpoint="nightly"))
        server.change("ADDED", a_pod("c", "u-3"))
        await until(lambda: there.names == ["a", "b", "a", "c"])
        assert there.changed[2].annotations == (("kybernate.io/checkpoint", "nightly"),)
        assert set(server.selectors) == {"spec.nodeName=node-1"}

    followed(two, work)


def test_probes_are_known_as_long_as_the_pod_is() -> None:
    probe = {"httpGet": {"port": 80}, "periodSeconds": 1, "failureThreshold": 2}
    pod = a_pod("a", "u-1")
    pod["spec"]["containers"][0].update(livenessProbe=probe, env=[{"name": "large", "value": "x"}])

    async def work(server: ApiServer, there: Following) -> None:
        await until(lambda: there.names)
        known = there.pods.probes["shop", "a"]
        name = known["spec"]["containers"][0]["name"]
        assert limit_by_probes(known, name, 0) == ProbeLimit(1.8, LIVENESS)
        assert "env" not in known["spec"]["containers"][0]
        pod["spec"]["containers"][0]["startupProbe"] = {**probe, "failureThreshold": 3}
        pod["status"]["containerStatuses"] = [{"name": name, "started": False, "image": "large"}]
        server.change("MODIFIED", pod)
        await until(lambda: limit_by_probes(there.pods.probes["shop", "a"], name, 0) == ProbeLimit(2.7, STARTUP))
        assert "image" not in there.pods.probes["shop", "a"]["status"]["containerStatuses"][0]
        server.change("DELETED", pod)
        await until(lambda: not there.pods.probes)

    followed(lambda server: setattr(server, "pods", [pod]), work)


def test_what_has_not_changed_is_not_said_again() -> None:
    async def work(server: ApiServer, there: Following) -> None:
        await until(lambda: there.names == ["a", "b"])
        server.change("MODIFIED", a_pod("a", "u-1"))
        server.change("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
        server.end_watch()
        server.change("MODIFIED", a_pod("b", "u-2"))
        await until(lambda: there.names == ["a", "b", "b"])
        assert server.lists == 2  # two pages: the end of a watch is no reason for a list

    followed(two, work)


def test_revision_that_is_too_old_leads_to_a_new_list() -> None:
    async def work(server: ApiServer, there: Following) -> None:
        await until(lambda: there.names == ["a", "b"])
        server.pods = [a_pod("b", "u-2", checkpoint="x"), a_pod("c", "u-3")]
        server.change("ERROR", {"code": 410, "message": "too old resource version"})
        await until(lambda: there.names == ["a", "b", "c"])
        assert there.pods.get("shop", "a") is None
        assert there.gone == 2

    followed(two, work)


def test_pod_that_is_deleted_is_gone() -> None:
    async def work(server: ApiServer, there: Following) -> None:
        await until(lambda: there.names == ["a", "b"])
        server.change("DELETED", a_pod("b", "u-2", checkpoint="x"))
        await until(lambda: there.pods.get("shop", "b") is None)
        assert there.gone == 2

    followed(two, work)


def test_missing_right_is_logged_once_and_tried_again() -> None:
    def prepare(server: ApiServer) -> None:
        two(server)
        server.refuse_lists = [403, 403]

    async def work(server: ApiServer, there: Following) -> None:
        await until(lambda: there.names == ["a", "b"])
        assert [entry["event"] for entry in there.log.entries] == ["kubernetes.pods_refused"]

    followed(prepare, work)


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_server_that_is_busy_is_asked_again_soon(status: int) -> None:
    """A list that is refused for a moment must not keep annotations waiting as a missing right does."""

    def prepare(server: ApiServer) -> None:
        two(server)
        server.refuse_lists = [status, status]

    async def work(server: ApiServer, there: Following) -> None:
        await until(lambda: there.names == ["a", "b"])
        assert there.paused == [FIRST_PAUSE, 2 * FIRST_PAUSE]
        assert [entry["event"] for entry in there.log.entries] == ["kubernetes.pods_not_listed"]

    followed(prepare, work)


def test_pause_of_one_outage_does_not_add_to_that_of_the_next() -> None:
    def prepare(server: ApiServer) -> None:
        two(server)
        server.refuse_lists = [503, 403, 503]

    async def work(server: ApiServer, there: Following) -> None:
        await until(lambda: there.names == ["a", "b"])
        assert there.paused == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
        server.change("MODIFIED", a_pod("a", "u-1", checkpoint="nightly"))
        await until(lambda: there.names == ["a", "b", "a"])
        server.refuse_lists = [503]
        server.pods = [a_pod("c", "u-3")]
        server.change("ERROR", {"code": 500, "message": "the watch has ended"})
        await until(lambda: there.names == ["a", "b", "a", "c"])
        assert there.paused[3:] == [FIRST_PAUSE, 2 * FIRST_PAUSE]
        assert [entry["event"] for entry in there.log.entries] == [
            "kubernetes.pods_not_listed", "kubernetes.pods_refused", "kubernetes.pods_not_listed",
        ]  # fmt: skip

    followed(prepare, work)


def test_watch_that_is_refused_is_not_begun_again_and_again() -> None:
    async def work(server: ApiServer, there: Following) -> None:
        for _ in range(3):
            server.change("ERROR", {"code": 403, "message": "pods is forbidden"})
            server.end_watch()
        await until(lambda: len(there.paused) == 3)
        assert there.paused == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
        assert [entry["event"] for entry in there.log.entries] == ["kubernetes.pods_refused"]

    followed(two, work)


def test_place_of_a_container_is_that_of_its_pods_spec() -> None:
    async def work(server: ApiServer, there: Following) -> None:
        await until(lambda: there.names == ["a", "b"])
        place = there.pods.field_of
        assert place(Subject("shop", "a", "u-1", "setup")) == "spec.initContainers{setup}"
        assert place(Subject("shop", "a", "u-1", "main")) == "spec.containers{main}"
        assert place(Subject("shop", "unknown", "u-9", "main")) == "spec.containers{main}"

    followed(two, work)


def test_pod_that_ends_or_has_ended_is_known_as_such() -> None:
    document = a_pod("a")
    document["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ending = pod_of(document)
    assert ending is not None
    assert ending.ending
    assert ending.running == {"main"}
    waiting = pod_of(a_pod("a", running=False))
    assert waiting is not None
    assert not waiting.running


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("metadata", "spec", "status"), JSON)))
def test_no_document_of_the_api_server_is_an_error(document: dict[str, Any]) -> None:
    pod_of(document)
    document["metadata"] = {"uid": "u", "annotations": document.get("spec")}
    assert pod_of(document) is not None
