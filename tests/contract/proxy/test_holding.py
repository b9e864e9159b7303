"""Requests for models that sleep: held, woken once, released in order, refused with a reason; the complaints of others'
users, over both data planes."""

from __future__ import annotations

import asyncio

import aiohttp

from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import CHAT, Stand


async def asking(stand: Stand, count: int, **more: object) -> list[asyncio.Task[aiohttp.ClientResponse]]:
    """Begin requests in an order, and return once all of them are held."""
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(stand.chat(number=number, **more)))
        await stand.until(lambda number=number: len(stand.held().waiting) == number + 1, "it is held")
    return tasks


async def test_many_requests_are_one_wake(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        stand.models.may_wake.clear()
        tasks = await asking(stand, 20)
        stand.models.may_wake.set()
        answers = await asyncio.gather(*tasks)
        assert {one.status for one in answers} == {200}
        assert stand.models.calls["wake qwen"] == 1


async def test_held_requests_are_released_in_order(standing_proxy: Standing) -> None:
    async with standing_proxy(model="concurrency: 1") as stand:
        stand.models.may_wake.clear()
        tasks = await asking(stand, 10)
        stand.models.may_wake.set()
        await asyncio.gather(*tasks)
        assert [one["json"]["number"] for one in stand.upstream.seen] == list(range(10))


async def test_release_keeps_to_the_concurrency(standing_proxy: Standing) -> None:
    async with standing_proxy("routes: [{to: qwen}]", model="concurrency: 3") as stand:
        stand.models.may_wake.clear()
        tasks = [asyncio.create_task(stand.client.get(f"{stand.url}/wait")) for _ in range(12)]
        await stand.until(lambda: len(stand.held().waiting) == 12)
        stand.models.may_wake.set()
        await stand.until(lambda: stand.upstream.running == 3, "as many as may run do")
        stand.upstream.may_end.set()
        assert {one.status for one in await asyncio.gather(*tasks)} == {200}
        assert stand.upstream.most == 3


async def test_requests_over_the_concurrency_wait_and_are_not_refused(standing_proxy: Standing) -> None:
    async with standing_proxy("routes: [{to: qwen}]", model="concurrency: 2", phase=Phase.AWAKE) as stand:
        tasks = [asyncio.create_task(stand.client.get(f"{stand.url}/wait")) for _ in range(16)]
        await stand.until(lambda: stand.upstream.running == 2, "as many as may run do")
        assert not [task for task in tasks if task.done()]
        stand.upstream.may_end.set()
        assert {one.status for one in await asyncio.gather(*tasks)} == {200}
        assert stand.upstream.most == 2


async def test_wake_that_fails_is_503_with_retry_after(standing_proxy: Standing) -> None:
    async with standing_proxy(model="retry_after: 7s") as stand:
        stand.models.failure = "no room on the GPU"
        answer = await stand.chat()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
        error = (await answer.json())["error"]
        assert error["code"] == "wake_failed"
        assert "no room on the GPU" in error["message"]


async def test_all_that_wait_for_a_wake_that_fails_are_answered(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        stand.models.may_wake.clear()
        tasks = await asking(stand, 5)
        stand.models.failure = "broken"
        stand.models.may_wake.set()
        assert {one.status for one in await asyncio.gather(*tasks)} == {503}
        assert not stand.held().waiting


async def test_model_wakes_after_a_wake_that_failed(standing_proxy: Standing) -> None:
    async with standing_proxy(model="retry_after: 10ms") as stand:
        stand.models.failure = "broken"
        assert (await stand.chat()).status == 503
        stand.models.failure = ""
        for _ in range(200):
            if (await stand.chat()).status == 200:
                break
        else:
            raise AssertionError("never woken again")


async def test_container_that_is_not_there_is_503(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        stand.models.change("qwen", Phase.ABSENT)
        await stand.until(lambda: stand.held().phase == Phase.ABSENT)
        answer = await stand.chat()
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "model_absent")
        assert stand.models.calls["wake qwen"] == 1  # it might be parked
        assert (await stand.chat()).status == 503
        assert stand.models.calls["wake qwen"] == 1


async def test_deadline_of_the_policy_is_504(standing_proxy: Standing) -> None:
    async with standing_proxy(model="queue: {age: 100ms}") as stand:
        stand.models.may_wake.clear()
        answer = await stand.chat()
        assert (answer.status, (await answer.json())["error"]["code"]) == (504, "deadline")


async def test_deadline_of_the_client_is_kept_where_it_is_smaller(standing_proxy: Standing) -> None:
    async with standing_proxy(model="queue: {age: 1h}") as stand:
        stand.models.may_wake.clear()
        for header in ({"X-Stainless-Read-Timeout": "0.1"}, {"Prefer": "wait=0.1"}, {"X-Request-Timeout": "0.1"}):
            assert (await stand.chat(headers=header)).status == 504


async def test_queue_that_is_full_is_503_and_not_429(standing_proxy: Standing) -> None:
    async with standing_proxy(model="queue: {count: 2}") as stand:
        stand.models.may_wake.clear()
        tasks = await asking(stand, 2)
        answer = await stand.chat()
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
        stand.models.may_wake.set()
        assert {one.status for one in await asyncio.gather(*tasks)} == {200}


async def test_queue_is_bounded_in_bytes(standing_proxy: Standing) -> None:
    async with standing_proxy(model="queue: {bytes: 4KiB}") as stand:
        stand.models.may_wake.clear()
        tasks = await asking(stand, 1, text="x" * 3000)
        answer = await stand.chat(text="x" * 3000)
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "queue_full")
        stand.models.may_wake.set()
        assert (await tasks[0]).status == 200


async def test_quota_is_429_with_retry_after(standing_proxy: Standing) -> None:
    async with standing_proxy("routes: [{quota: 2}]", phase=Phase.AWAKE) as stand:
        answers = [await stand.chat() for _ in range(3)]
        assert [one.status for one in answers] == [200, 200, 429]
        assert int(answers[2].headers["Retry-After"]) >= 1


async def test_client_that_hangs_up_waits_no_more(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        stand.models.may_wake.clear()
        (task,) = await asking(stand, 1)
        task.cancel()
        await stand.until(lambda: not stand.held().waiting, "it has left the queue")
        stand.models.may_wake.set()
        assert (await stand.chat()).status == 200
        assert len(stand.upstream.seen) == 1


async def test_client_that_hangs_up_with_a_large_body_waits_no_more(embedded_proxy: Standing) -> None:
    """Of which the proxy reads nothing while it waits, so that it sees no end of the connection by itself."""
    async with embedded_proxy("routes: [{to: qwen}]") as stand:
        stand.models.may_wake.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(b"POST /sink HTTP/1.1\r\nHost: h\r\nContent-Length: 50000000\r\n\r\n" + bytes(700_000))
        await stand.until(lambda: stand.held().waiting)
        writer.close()
        await stand.until(lambda: not stand.held().waiting, "it has left the queue")
        assert reader is not None


async def test_model_that_is_killed_under_load_hangs_no_request(standing_proxy: Standing) -> None:
    """Each request is answered: by the model, or with an error that says that the model ended the connection."""
    async with standing_proxy(phase=Phase.AWAKE, model="concurrency: 8") as stand:
        port, answers = stand.upstream.port, list[int]()

        async def asks(number: int) -> None:
            for step in range(15):
                try:
                    answers.append((await stand.chat(number=number * 100 + step)).status)
                except aiohttp.ServerDisconnectedError:  # HAProxy's word for it on a connection that it has used before
                    answers.append(502)

        clients = [asyncio.create_task(asks(number)) for number in range(16)]
        for at in (40, 120):
            await stand.until(lambda at=at: len(answers) >= at)
            await stand.upstream.stop()
            await stand.upstream.start(port)
        await asyncio.gather(*clients)
        assert len(answers) == 240
        assert set(answers) <= {200, 502, 503}
        assert answers.count(200) >= 200
        assert stand.held().in_flight == 0


async def test_client_that_hangs_up_ends_its_request_upstream(standing_proxy: Standing) -> None:
    async with standing_proxy("routes: [{to: qwen}]", phase=Phase.AWAKE) as stand:
        task = asyncio.create_task(stand.client.get(f"{stand.url}/wait"))
        await stand.until(lambda: stand.upstream.running == 1)
        task.cancel()
        await stand.until(lambda: stand.upstream.gone == 1, "the upstream noticed")


async def test_client_that_leaves_a_stream_ends_it_upstream(standing_proxy: Standing) -> None:
    async with standing_proxy("routes: [{to: qwen}]", phase=Phase.AWAKE) as stand:
        answer = await stand.client.get(f"{stand.url}/stream")
        assert await answer.content.readline() == b"data: first\n"
        answer.close()
        await stand.until(lambda: stand.upstream.gone == 1, "the upstream noticed")


async def test_request_during_a_suspend_waits_and_wakes(standing_proxy: Standing) -> None:
    async with standing_proxy(phase=Phase.AWAKE) as stand:
        stand.models.may_sleep.clear()
        stand.service.engine.want_suspended("qwen")
        await stand.until(lambda: stand.held().phase == Phase.SUSPENDING)
        (task,) = await asking(stand, 1)
        stand.models.may_sleep.set()
        assert (await task).status == 200
        assert (stand.models.calls["suspend qwen"], stand.models.calls["wake qwen"]) == (1, 1)


async def test_suspend_that_fails_reopens(standing_proxy: Standing) -> None:
    async with standing_proxy(phase=Phase.AWAKE) as stand:
        stand.models.may_sleep.clear()
        stand.service.engine.want_suspended("qwen")
        await stand.until(lambda: stand.held().phase == Phase.SUSPENDING)
        (task,) = await asking(stand, 1)
        stand.models.failure = "the driver refuses"
        stand.models.may_sleep.set()
        assert (await task).status == 200
        assert stand.models.calls["wake qwen"] == 0


async def test_stream_is_never_suspended(standing_proxy: Standing) -> None:
    async with standing_proxy("routes: [{to: qwen}]", model="idle: 50ms\ndrain: 1h") as stand:
        async with stand.client.get(f"{stand.url}/stream") as answer:
            assert await answer.content.readline() == b"data: first\n"
            suspends = stand.models.calls["suspend qwen"]
            stand.service.engine.want_suspended("qwen")
            assert (await (await stand.client.get(f"{stand.url}/echo")).json())["path"] == "/echo"
            assert stand.models.calls["suspend qwen"] == suspends
            stand.upstream.may_end.set()
            assert b"data: second" in await answer.read()
        await stand.until(lambda: stand.models.calls["suspend qwen"] > suspends, "suspended afterwards")


async def test_drain_that_does_not_end_is_undone(standing_proxy: Standing) -> None:
    async with standing_proxy("routes: [{to: qwen}]", phase=Phase.AWAKE, model="drain: 50ms") as stand:
        answer = await stand.client.get(f"{stand.url}/stream")
        async with answer:
            assert await answer.content.readline() == b"data: first\n"
            await stand.until(lambda: stand.held().in_flight + stand.held().elsewhere == 1 or stand.plane == "haproxy")
            stand.service.engine.want_suspended("qwen")
            await stand.until(lambda: '"was": "draining"' in stand.log.getvalue(), "reopened")
            assert stand.models.calls["suspend qwen"] == 0
            assert (await stand.client.get(f"{stand.url}/echo")).status == 200
            stand.upstream.may_end.set()
            assert b"data: second" in await answer.read()


async def test_idle_model_is_suspended_and_wakes_again(standing_proxy: Standing) -> None:
    async with standing_proxy(model="idle: 20ms") as stand:
        for round in (1, 2, 3):
            assert (await stand.chat()).status == 200
            await stand.until(lambda round=round: stand.models.calls["suspend qwen"] == round, "suspended")


async def test_awake_model_is_not_held_up_by_one_that_wakes(standing_proxy: Standing) -> None:
    other = "  llama: {container: llama, upstream: 'http://127.0.0.1:{port}'}"
    async with standing_proxy(other, phase=Phase.AWAKE) as stand:
        stand.models.change("llama", Phase.ASLEEP)
        await stand.until(lambda: stand.held("llama").phase == Phase.ASLEEP)
        stand.models.may_wake.clear()
        waiting = asyncio.create_task(stand.chat(model="llama"))
        await stand.until(lambda: stand.held("llama").waiting)
        assert (await stand.chat()).status == 200
        assert not waiting.done()
        stand.models.may_wake.set()
        assert (await waiting).status == 200


async def test_first_request_waits_for_the_port_and_is_no_502(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        port = stand.upstream.port
        await stand.upstream.stop()
        task = asyncio.create_task(stand.chat())
        await stand.until(lambda: stand.models.phases["qwen"] == Phase.AWAKE, "its container computes")
        await stand.upstream.start(port)
        assert (await task).status == 200


async def test_port_that_never_accepts_fails_the_wake(standing_proxy: Standing) -> None:
    async with standing_proxy(model="wake_timeout: 200ms") as stand:
        await stand.upstream.stop()
        answer = await stand.chat()
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "wake_failed")
        assert "port" in (await answer.json())["error"]["message"]


async def test_model_that_something_else_suspends_is_woken(standing_proxy: Standing) -> None:
    async with standing_proxy(phase=Phase.AWAKE) as stand:
        assert (await stand.chat()).status == 200
        stand.models.change("qwen", Phase.ASLEEP)
        await stand.until(lambda: stand.held().phase == Phase.ASLEEP)
        assert (await stand.chat()).status == 200
        assert stand.models.calls["wake qwen"] == 1


async def test_model_that_sleeps_again_before_its_port_accepts_is_not_taken_for_awake(standing_proxy: Standing) -> None:
    """A frozen program's port accepts, and its requests would wait without an end."""
    async with standing_proxy() as stand:
        port = stand.upstream.port
        await stand.upstream.stop()
        stand.models.change("qwen", Phase.AWAKE)
        await stand.until(lambda: stand.held().phase == Phase.WAKING, "its port is waited for")
        stand.models.change("qwen", Phase.ASLEEP)
        await stand.until(stand.models.all_said)
        await stand.upstream.start(port)
        await stand.until(lambda: stand.held().phase == Phase.ASLEEP, "it sleeps")
        assert (await stand.chat()).status == 200
        assert stand.models.calls["wake qwen"] == 1


async def test_model_that_is_awake_for_a_moment_is_not_taken_for_awake(standing_proxy: Standing) -> None:
    """Both are said before the proxy has begun to look at its port."""
    async with standing_proxy() as stand:
        stand.models.change("qwen", Phase.AWAKE)
        stand.models.change("qwen", Phase.ASLEEP)
        await stand.until(stand.models.all_said)
        assert (await stand.chat()).status == 200
        assert stand.models.calls["wake qwen"] == 1


async def test_model_that_something_else_wakes_is_not_woken(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        stand.models.change("qwen", Phase.AWAKE)
        assert (await stand.chat()).status == 200
        assert stand.models.calls["wake qwen"] == 0


async def test_cold_start_is_marked(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        cold, warm = await stand.chat(), await stand.chat()
        assert int(cold.headers["X-Kybernate-Wake-Ms"]) >= 0
        assert "X-Kybernate-Wake-Ms" not in warm.headers
        text = await stand.metrics()
        assert 'kybernate_proxy_requests_total{code="200",cold="yes",model="qwen"} 1.0' in text
        assert 'kybernate_proxy_wakes_total{model="qwen",outcome="woken"} 1.0' in text


async def test_sleeping_model_has_metrics(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        text = await stand.metrics()
        assert 'kybernate_proxy_model_state{model="qwen",state="asleep"} 1.0' in text
        assert 'kybernate_proxy_waiting{model="qwen"} 0.0' in text
        assert 'kybernate_proxy_wakes_total{model="qwen",outcome="failed"} 0.0' in text


async def test_probes_are_answered_while_asleep_and_wake_nothing(standing_proxy: Standing) -> None:
    probes = "probes: [{path: /healthz, body: sleeping}, {path: /ready, status: 503}]"
    async with standing_proxy("routes: [{to: qwen}]", model=probes) as stand:
        answer = await stand.client.get(f"{stand.url}/healthz", headers={"User-Agent": "kube-probe/1.37"})
        assert (answer.status, await answer.text()) == (200, "sleeping")
        assert (await stand.client.get(f"{stand.url}/ready")).status == 503
        assert not stand.models.calls
        assert (await stand.client.get(f"{stand.url}/echo")).status == 200
        assert (await (await stand.client.get(f"{stand.url}/healthz")).json())["path"] == "/healthz"


async def test_probes_of_an_awake_model_are_no_activity(standing_proxy: Standing) -> None:
    settings = "probes: [{path: /healthz}]\nidle: 2s"  # longer than HAProxy's traffic is looked at
    async with standing_proxy("routes: [{to: qwen}]", phase=Phase.AWAKE, model=settings) as stand:
        while not stand.models.calls["suspend qwen"]:  # the time limit of the test ends this if probes are activity
            assert (await stand.client.get(f"{stand.url}/healthz")).status == 200


async def test_stream_shows_progress_while_it_waits(standing_proxy: Standing) -> None:
    async with standing_proxy(model="progress: comments\nprogress_every: 100ms") as stand:
        stand.models.may_wake.clear()
        body = CHAT | {"stream": True}
        async with stand.client.post(f"{stand.url}/v1/chat/completions", json=body) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            assert (await answer.content.readline()).startswith(b": waiting, place 1")
            stand.models.may_wake.set()
            rest = await answer.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"hel"' in rest


async def test_failure_after_progress_is_an_event(standing_proxy: Standing) -> None:
    async with standing_proxy(model="progress: chunks\nprogress_every: 100ms") as stand:
        stand.models.may_wake.clear()
        body = CHAT | {"stream": True}
        async with stand.client.post(f"{stand.url}/v1/chat/completions", json=body) as answer:
            assert b"reasoning_content" in await answer.content.readline()
            stand.models.failure = "broken"
            stand.models.may_wake.set()
            assert b'"code": "wake_failed"' in await answer.read()


async def test_stop_of_the_proxy_answers_all_that_wait(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        stand.models.may_wake.clear()
        tasks = await asking(stand, 3)
        await stand.service.engine.close()
        answers = await asyncio.gather(*tasks)
        assert {(one.status, one.headers.get("Retry-After")) for one in answers} == {(503, "10")}
