"""What goes through unchanged, both ways and as it arrives, and what a proxy must change."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import CHAT

TO_QWEN = "routes: [{to: qwen}]"
MIB = 1 << 20


async def test_method_path_query_and_body_go_through(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            target = aiohttp.client.URL(f"{stand.url}/a%2Fb/%20?x=%26&y=1&y=2;z", encoded=True)
            async with stand.client.request(method, target, data=b"\x00\xff" if method != "GET" else None) as answer:
                assert answer.status == 200
            seen = stand.upstream.seen[-1]
            assert (seen["method"], seen["path"]) == (method, "/a%2Fb/%20?x=%26&y=1&y=2;z")
            assert seen["body"] == (b"\x00\xff" if method != "GET" else b"")


async def test_headers_of_one_connection_stay_there(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        answer = await stand.raw(
            b"GET /x HTTP/1.1\r\nHost: h.example\r\nConnection: close, X-Private\r\nX-Private: 1\r\nX-Kept: 2\r\n"
            b"Keep-Alive: timeout=5\r\nProxy-Authorization: Basic eA==\r\nTE: gzip\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200")
        names = {name.lower() for name in stand.upstream.seen[-1]["names"]}
        assert "x-kept" in names
        assert not names & {"x-private", "keep-alive", "proxy-authorization", "te"}


async def test_client_cannot_forge_where_it_comes_from(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        forged = {"X-Forwarded-For": "1.2.3.4", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "evil"}
        await stand.client.get(f"{stand.url}/x", headers=forged)
        headers = {name.lower(): value for name, value in stand.upstream.seen[-1]["headers"].items()}
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert headers["x-forwarded-proto"] == "http"
        assert headers["x-forwarded-host"] == f"127.0.0.1:{stand.port}"


async def test_proxy_before_this_one_is_believed_where_it_is_trusted(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, top="trusted: [127.0.0.0/8]", phase=Phase.AWAKE) as stand:
        before = {"X-Forwarded-For": "1.2.3.4", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "public.example"}
        await stand.client.get(f"{stand.url}/x", headers=before)
        headers = stand.upstream.seen[-1]["headers"]
        assert ", ".join(headers.getall("X-Forwarded-For")) == "1.2.3.4, 127.0.0.1"
        assert (headers["x-forwarded-proto"], headers["x-forwarded-host"]) == ("https", "public.example")


async def test_request_has_an_id(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        given = await stand.client.get(f"{stand.url}/x", headers={"X-Request-Id": "abc-1"})
        assert given.headers["X-Request-Id"] == "abc-1"
        odd = await stand.client.get(f"{stand.url}/x", headers={"X-Request-Id": 'a"b c'})
        made = odd.headers["X-Request-Id"]
        assert made
        assert made != 'a"b c'
        assert [one["headers"]["X-Request-Id"] for one in stand.upstream.seen] == ["abc-1", made]


async def test_continue_is_sent_when_the_body_is_wanted(standing_proxy: Standing) -> None:
    async with standing_proxy(phase=Phase.AWAKE) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        body = json.dumps(CHAT).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_body_arrives_upstream_before_its_end(standing_proxy: Standing) -> None:
    """A body in chunks, of which the second is sent once the upstream has taken the first."""
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        taken = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"first"
            await taken.wait()
            yield b"second"

        task = asyncio.create_task(stand.client.post(f"{stand.url}/sink", data=pieces()))
        await stand.until(lambda: stand.upstream.running == 1, "the upstream has the request")
        taken.set()
        assert (await (await task).json())["size"] == 11


async def test_answer_arrives_before_its_end(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand, stand.client.get(f"{stand.url}/stream") as answer:
        assert answer.content_type == "text/event-stream"
        assert await answer.content.readuntil(b"\n\n") == b"data: first\n\n"
        stand.upstream.may_end.set()
        assert await answer.read() == b"data: second\n\n"


async def test_large_bodies_go_through_in_chunks_and_with_a_length(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(24):
                yield bytes(MIB)

        assert (await (await stand.client.post(f"{stand.url}/sink", data=pieces())).json())["size"] == 24 * MIB
        answer = await stand.client.post(f"{stand.url}/sink", data=bytes(24 * MIB))
        assert (await answer.json())["size"] == 24 * MIB
        async with stand.client.get(f"{stand.url}/big?bytes={24 * MIB}") as big:
            assert big.headers["Content-Length"] == str(24 * MIB)
            assert len(await big.read()) == 24 * MIB


async def test_upstream_that_reads_slowly_slows_the_client(standing_proxy: Standing) -> None:
    """Not what the proxy has room for, but what the sockets have: the client cannot send all of it."""
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        sent = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(256):
                sent += MIB
                yield bytes(MIB)

        task = asyncio.create_task(stand.client.post(f"{stand.url}/slow-reader", data=pieces()))
        await stand.until(lambda: stand.upstream.seen, "the upstream has the head")
        last = -1
        while sent != last:  # until no byte moves any more
            last = sent
            await asyncio.sleep(0.3)
        assert sent < 128 * MIB
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_status_and_answers_without_body_go_through(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        for code in (201, 204, 304, 400, 404, 429, 500, 503):
            answer = await stand.client.get(f"{stand.url}/status?code={code}")
            assert (answer.status, await answer.text()) == (code, "" if code in (204, 304) else "as asked")


async def test_answer_that_breaks_off_is_seen_to_be_cut(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        with pytest.raises(aiohttp.ClientError):
            await (await stand.client.get(f"{stand.url}/break")).read()
        assert (await stand.client.get(f"{stand.url}/x")).status == 200


async def test_websocket_wakes_and_counts_as_activity(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, model="idle: 20ms") as stand:
        async with stand.client.ws_connect(f"{stand.url}/ws") as socket:
            for word in ("one", "two", "x" * 300_000):
                await socket.send_str(word)
                assert (await socket.receive()).data == f"echo {word}"
            await asyncio.sleep(0.1)  # five times what an idle model has, as nothing must happen
            assert stand.models.calls["suspend qwen"] == 0
            await socket.send_str("three")
            assert (await socket.receive()).data == "echo three"
        await stand.until(lambda: stand.models.calls["suspend qwen"] == 1, "suspended once it is closed")


async def test_upgrade_that_is_refused_is_an_answer(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await stand.client.ws_connect(f"{stand.url}/no-socket")


async def test_connection_is_kept_for_the_next_request(standing_proxy: Standing) -> None:
    async with standing_proxy(phase=Phase.AWAKE) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        body = json.dumps(CHAT).encode()
        for _ in range(3):
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n")
            writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
        writer.close()


# ---- routes


async def test_models_are_found_by_name_alias_and_query(standing_proxy: Standing) -> None:
    async with standing_proxy(model="aliases: [gpt-4o, best]", phase=Phase.AWAKE) as stand:
        assert (await stand.chat()).status == 200
        assert (await stand.chat(model="best")).status == 200
        assert (await stand.client.get(f"{stand.url}/v1/realtime?model=gpt-4o")).status == 200
        unknown = await stand.chat(model="gpt-5")
        error = (await unknown.json())["error"]
        assert (unknown.status, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_request_without_a_model_is_explained(standing_proxy: Standing) -> None:
    async with standing_proxy(phase=Phase.AWAKE) as stand:
        for body in (b"{}", b"[1]", b"not json", b'{"model": 7}', b""):
            answer = await stand.client.post(f"{stand.url}/v1/chat/completions", data=body)
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "model_missing")


async def test_routes_by_host_path_and_header(standing_proxy: Standing) -> None:
    routes = """
  lab: {container: lab, upstream: "http://127.0.0.1:{port}"}
routes:
  - {host: lab.example, to: lab}
  - {path: /notebook/, to: lab}
  - {headers: {X-Team: red}, to: lab}
  - {path: /v1}
"""
    async with standing_proxy(routes, phase=Phase.AWAKE) as stand:
        await stand.until(lambda: stand.held("lab").phase == Phase.AWAKE)
        for path, headers in (
            ("/a", {"Host": "lab.example:80"}), ("/notebook/x", {}), ("/b", {"x-team": "red"}),
        ):  # fmt: skip
            assert (await stand.client.get(stand.url + path, headers=headers)).status == 200, path
        assert (await stand.chat()).status == 200
        assert (await stand.client.get(f"{stand.url}/notebooks")).status == 404
        text = await stand.metrics()
        assert stand.plane != "embedded" or 'requests_total{code="200",cold="no",model="lab"} 3.0' in text


async def test_warm_selector_takes_the_one_that_is_awake(standing_proxy: Standing) -> None:
    more = """
  llama: {container: llama, upstream: "http://127.0.0.1:{port}"}
selectors:
  any: {choose: warm, of: [qwen, llama]}
"""
    async with standing_proxy(more) as stand:
        stand.models.change("llama", Phase.AWAKE)
        await stand.until(lambda: stand.held("llama").phase == Phase.AWAKE)
        assert (await stand.chat(model="any")).status == 200
        assert not stand.models.calls


async def test_spillover_takes_the_next_one_when_busy(standing_proxy: Standing) -> None:
    more = """
  llama: {upstream: "http://127.0.0.1:{port}", upstream_model: second}
selectors:
  any: {choose: spillover, of: [qwen, llama]}
"""
    async with standing_proxy(more, model="concurrency: 1", phase=Phase.AWAKE) as stand:
        busy = asyncio.create_task(stand.client.post(f"{stand.url}/wait", json=CHAT | {"model": "any"}))
        await stand.until(lambda: stand.upstream.running == 1)
        assert (await (await stand.chat(model="any")).json())["got"]["model"] == "second"
        stand.upstream.may_end.set()
        assert (await busy).status == 200


async def test_peer_gets_its_own_key(standing_proxy: Standing, tmp_path: Path) -> None:
    (tmp_path / "peer").write_text("sk-peer\n")
    peers = f"peers: {{lab2: {{url: 'http://127.0.0.1:{{port}}', models: [far], key_file: {tmp_path}/peer}}}}"
    async with standing_proxy(peers, phase=Phase.AWAKE) as stand:
        answer = await stand.chat(model="far", headers={"Authorization": "Bearer sk-client"})
        assert answer.status == 200
        assert stand.upstream.seen[-1]["headers"]["Authorization"] == "Bearer sk-peer"


async def test_filters_set_strip_and_override(standing_proxy: Standing) -> None:
    filters = "upstream_model: Qwen/Qwen3\nfilters: {set: {top_k: 5, n: 2}, strip: [seed], override: {max_tokens: 9}}"
    async with standing_proxy(model=filters, phase=Phase.AWAKE) as stand:
        answer = await stand.chat(n=1, seed=7, max_tokens=100)
        got = (await answer.json())["got"]
        assert (got["model"], got["top_k"], got["n"], got["max_tokens"]) == ("Qwen/Qwen3", 5, 1, 9)
        assert "seed" not in got


async def test_keys_are_required_and_not_passed_on(standing_proxy: Standing, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-alice").hexdigest()
    (tmp_path / "keys").write_text(f"# people\nalice {digest}\n")
    async with standing_proxy(f"routes: [{{keys: {tmp_path}/keys}}]", phase=Phase.AWAKE) as stand:
        refused = await stand.chat(headers={"Authorization": "Bearer sk-bob"})
        assert (refused.status, (await refused.json())["error"]["type"]) == (401, "authentication_error")
        assert (await stand.chat()).status == 401
        for headers in ({"Authorization": "Bearer sk-alice"}, {"x-api-key": "sk-alice"}):
            assert (await stand.chat(headers=headers)).status == 200
            assert not {"authorization", "x-api-key"} & {one.lower() for one in stand.upstream.seen[-1]["names"]}


async def test_list_of_models_has_their_states(standing_proxy: Standing) -> None:
    more = "  llama: {upstream: 'http://127.0.0.1:{port}'}\nselectors: {any: {choose: warm, of: [qwen]}}"
    async with standing_proxy(more, model="aliases: [best]") as stand:
        listed = await (await stand.client.get(f"{stand.url}/v1/models")).json()
        states = {one["id"]: one["state"] for one in listed["data"]}
        assert states == {"qwen": "asleep", "best": "asleep", "llama": "awake", "any": "selector"}
        one = await (await stand.client.get(f"{stand.url}/v1/models/best")).json()
        assert (one["id"], one["alias_of"]) == ("best", "qwen")
        assert (await stand.client.get(f"{stand.url}/v1/models/none")).status == 404
        assert not stand.models.calls


async def test_errors_have_the_form_of_their_api(standing_proxy: Standing) -> None:
    async with standing_proxy("routes: [{path: /v1}]") as stand:
        stand.models.failure = "broken"
        anthropic = await stand.client.post(f"{stand.url}/v1/messages", json=CHAT)
        assert anthropic.status == 503
        value = await anthropic.json()
        assert (value["type"], value["error"]["type"]) == ("error", "overloaded_error")
        plain = await stand.client.get(f"{stand.url}/elsewhere")
        assert (plain.status, plain.content_type) == (404, "text/plain")


async def test_model_that_is_restarted_is_reached_without_a_failure(standing_proxy: Standing) -> None:
    """Its port refuses for a moment; a body that was not sent yet is sent when it accepts again."""
    async with standing_proxy(phase=Phase.AWAKE) as stand:
        assert (await stand.chat()).status == 200
        port = stand.upstream.port
        await stand.upstream.stop()
        task = asyncio.create_task(stand.chat())
        await asyncio.sleep(0.05)
        await stand.upstream.start(port)
        assert (await task).status == 200


async def test_many_at_once_lose_none(standing_proxy: Standing) -> None:
    async with standing_proxy(model="concurrency: 16\nqueue: {count: 2000}") as stand:
        stand.models.may_wake.clear()
        tasks = [asyncio.create_task(stand.chat(number=number)) for number in range(300)]
        await stand.until(lambda: len(stand.held().waiting) == 300, "all are held")
        stand.models.may_wake.set()
        answers = await asyncio.gather(*tasks)
        assert {one.status for one in answers} == {200}
        assert sorted(one["json"]["number"] for one in stand.upstream.seen) == list(range(300))
