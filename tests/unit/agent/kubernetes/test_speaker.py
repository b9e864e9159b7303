"""Events reach the API server, whatever it answers, and never hold up the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from kybernate.agent.events.log import made
from kybernate.agent.kubernetes import series, speaker
from kybernate.agent.kubernetes.access import Access
from kybernate.agent.kubernetes.api import Api
from kybernate.agent.kubernetes.speaker import Speaker
from kybernate.agent.kubernetes.story import Subject, Told
from tests.fakes.api_server import ApiServer, api_server

POD = Subject("shop", "web", "u-1", "main")
NAMESPACE, CONTAINER = "k8s.io", "c" * 64


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaker, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(series, "FIRST_PAUSE", 0.001)


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not look():  # noqa: ASYNC110  # of a thread, which sets no event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def speaking(access: Access, settled: list[int] | None = None) -> Any:
    log = structlog.testing.LogCapture()
    api = Api(access)
    subject_of = lambda namespace, id: POD if (namespace, id) == (NAMESPACE, CONTAINER) else None  # noqa: E731
    field_of = lambda one: f"spec.containers{{{one.container}}}"  # noqa: E731

    async def note(id: int) -> None:
        if settled is not None:
            settled.append(id)

    found = Speaker(api, "node-1", subject_of, field_of, _log(log), settled=note)
    task = asyncio.create_task(found.run())
    try:
        yield found, log
    finally:
        task.cancel()
        await asyncio.wait({task})
        await api.close()


def with_speaker(work: Callable[[ApiServer, Speaker, Any], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        with api_server() as server:
            async with speaking(Access(server.url, token="secret")) as (found, log):
                await work(server, found, log)

    asyncio.run(run())


def event(type: str, **fields: str) -> Any:
    return made(type, "info", "words", container=CONTAINER, namespace=NAMESPACE, **fields)


def names(log: structlog.testing.LogCapture) -> list[str]:
    return [str(entry["event"]) for entry in log.entries]


def _log(capture: structlog.testing.LogCapture) -> Any:
    return structlog.wrap_logger(structlog.ReturnLogger(), processors=[capture])


def test_event_names_pod_and_container_as_kubelets() -> None:
    async def work(server: ApiServer, found: Speaker, log: Any) -> None:
        found.offer(event("container.suspended", vram_bytes="1073741824"))
        await until(lambda: server.events)
        (one,) = server.events.values()
        assert one["involvedObject"] == {
            "apiVersion": "v1", "kind": "Pod", "namespace": "shop", "name": "web", "uid": "u-1",
            "fieldPath": "spec.containers{main}",
        }  # fmt: skip
        assert (one["reason"], one["type"], one["count"]) == ("Suspended", "Normal", 1)
        assert one["message"] == "Moved the container's GPU memory into host memory: 1.0 GiB"
        assert one["source"] == {"component": "kybernate", "host": "node-1"}
        assert one["metadata"]["namespace"] == "shop"
        assert server.tokens == ["Bearer secret"]

    with_speaker(work)


def test_repetition_is_counted_in_the_same_object() -> None:
    async def work(server: ApiServer, found: Speaker, log: Any) -> None:
        for number in range(1, 4):
            found.say(POD, Told("Restored", "x"))
            await until(lambda number=number: server.story() == [("Restored", "x", number)])
        assert server.writes == ["create", "patch", "patch"]

    with_speaker(work)


def test_object_that_has_expired_is_made_again() -> None:
    async def work(server: ApiServer, found: Speaker, log: Any) -> None:
        found.say(POD, Told("Restored", "x"))
        await until(lambda: server.events)
        server.events.clear()
        found.say(POD, Told("Restored", "x"))
        await until(lambda: server.story() == [("Restored", "x", 2)])

    with_speaker(work)


def test_answer_that_was_lost_leads_to_no_second_object() -> None:
    async def work(server: ApiServer, found: Speaker, log: Any) -> None:
        server.refuse = [-500]
        found.say(POD, Told("Restored", "x"))
        await until(lambda: names(log)[-1:] == ["kubernetes.regained"])
        found.say(POD, Told("Restored", "x"))
        await until(lambda: server.story() == [("Restored", "x", 2)])

    with_speaker(work)


@pytest.mark.parametrize("status", [500, 503, 429, 401])
def test_event_waits_for_an_api_server_that_is_away(status: int) -> None:
    async def work(server: ApiServer, found: Speaker, log: Any) -> None:
        server.refuse = [status] * 3
        found.say(POD, Told("Restored", "x"))
        await until(lambda: server.story() == [("Restored", "x", 1)])
        await until(lambda: names(log)[-1:] == ["kubernetes.regained"])
        assert names(log) == ["kubernetes.lost", "kubernetes.regained"]  # once, not for each attempt

    with_speaker(work)


def test_event_that_is_refused_is_dropped_and_the_next_one_is_not() -> None:
    async def work(server: ApiServer, found: Speaker, log: Any) -> None:
        server.refuse = [422, 422]
        for number in range(3):
            found.say(POD, Told(f"Reason{'abc'[number]}", "x"))
        await until(lambda: server.story() == [("Reasonc", "x", 1)])
        await until(lambda: "kubernetes.events_dropped" in names(log))
        assert names(log).count("kubernetes.refused") == 1

    with_speaker(work)


def test_event_waits_for_a_right_and_holds_up_no_other_one() -> None:
    """As of an API server that has just begun, or of one namespace whose quota is used up."""

    async def work(server: ApiServer, found: Speaker, log: Any) -> None:
        server.refuse = [403]
        for name in "ab":
            found.say(POD, Told(f"Reason{name}", "x"))
        await until(lambda: [reason for reason, _, _ in server.story()] == ["Reasonb", "Reasona"])
        assert names(log) == ["kubernetes.refused"]

    with_speaker(work)


def test_no_server_at_all_blocks_nobody() -> None:
    async def run() -> None:
        async with speaking(Access("http://127.0.0.1:9")) as (found, log):
            found.say(POD, Told("Restored", "x"))
            await until(lambda: names(log) == ["kubernetes.lost"])
            found.offer(event("container.suspended"))

    asyncio.run(run())


@pytest.mark.parametrize("token", ["two\nlines", "\udc80", "ä"])
def test_token_that_no_header_can_have_ends_nothing(tmp_path: Path, token: str) -> None:
    async def run() -> None:
        with api_server() as server:
            file = tmp_path / "token"
            file.write_bytes(token.encode(errors="surrogateescape"))
            async with speaking(Access(server.url, token_file=file)) as (found, log):
                found.say(POD, Told("Restored", "x"))
                await until(lambda: names(log) == ["kubernetes.lost"])
                file.write_text("right")
                await until(lambda: server.tokens[-1:] == ["Bearer right"])

    asyncio.run(run())


def test_failure_that_shim_and_agent_report_is_told_once() -> None:
    async def work(server: ApiServer, found: Speaker, log: Any) -> None:
        found.offer(event("checkpoint.failed", error="cause"))
        found.offer(event("operation.failed", verb="checkpoint", error="cause"))
        found.offer(event("operation.failed", verb="suspend", error="late"))
        found.offer(event("suspend.failed", error="late"))
        found.offer(event("checkpoint.failed", error="again"))
        await until(lambda: len(server.events) == 3)
        assert [reason for reason, _, _ in server.story()] == ["CheckpointFailed", "SuspendFailed", "CheckpointFailed"]

    with_speaker(work)


def test_what_is_settled_is_known_after_each_write() -> None:
    async def run() -> None:
        settled: list[int] = []
        with api_server() as server:
            async with speaking(Access(server.url), settled) as (found, _):
                server.refuse = [403, 0]  # the first waits, the second is written
                for id, type in ((5, "container.suspended"), (6, "container.resumed"), (7, "agent.started")):
                    one = event(type)
                    one.id = id
                    found.offer(one)
                await until(lambda: len(settled) == 2)
                assert settled == [4, 7]

    asyncio.run(run())


def test_containers_of_no_pod_are_passed_over() -> None:
    async def work(server: ApiServer, found: Speaker, log: Any) -> None:
        found.offer(made("container.suspended", "info", "x", container="other", namespace="default"))
        found.offer(event("container.resumed"))
        await until(lambda: server.events)
        assert [reason for reason, _, _ in server.story()] == ["Resumed"]

    with_speaker(work)
