"""What the plane of HAProxy alone has: no Python in the path, HTTP/2, gRPC, streams that outlive the proxy."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest

from kybernate.proxy import service
from kybernate.proxy.haproxy.child import HaproxyUnusable, check, find_binary
from kybernate.proxy.haproxy.generated import ACTIVATOR, backend_of
from kybernate.proxy.haproxy.plane import printed
from kybernate.proxy.holding import Phase
from kybernate.proxy.settings import parse
from kybernate_shim.logs import Log
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import CHAT, FakeModels, Stand, end, free_port, standing
from tests.contract.proxy.test_clients import curl


@pytest.fixture
def haproxy(tmp_path: Path) -> Standing:
    return partial(standing, plane="haproxy", place=tmp_path)


def passed_by_python(stand: Stand) -> int:
    found = re.findall(r"kybernate_proxy_requests_total\{.*\} (\d+)", stand.service.metrics.text().decode())
    return sum(map(int, found))


async def test_requests_of_awake_models_pass_no_python(haproxy: Standing) -> None:
    async with haproxy(model="aliases: [best]") as stand:
        assert (await stand.chat()).headers["X-Kybernate-Wake-Ms"]
        await stand.until(lambda: not stand.held().closed)
        assert passed_by_python(stand) == 1
        for _ in range(20):
            assert (await stand.chat()).status == 200
            assert (await stand.chat(model="best")).status == 200
        assert passed_by_python(stand) == 1
        assert len(stand.upstream.seen) == 41


async def test_requests_of_models_without_a_container_pass_no_python(haproxy: Standing) -> None:
    async with haproxy("  far: {upstream: 'http://127.0.0.1:{port}'}") as stand:
        await stand.until(lambda: stand.service.plane._wanted["far"] != ACTIVATOR, "it is passed by HAProxy")
        for _ in range(5):
            assert (await stand.chat(model="far")).status == 200
        assert passed_by_python(stand) == 0


async def test_their_traffic_keeps_a_model_awake_and_its_end_suspends_it(haproxy: Standing) -> None:
    async with haproxy("routes: [{to: qwen}]", model="idle: 1s", phase=Phase.AWAKE) as stand:
        async with stand.client.get(f"{stand.url}/stream") as answer:
            assert await answer.content.readline() == b"data: first\n"
            assert passed_by_python(stand) == 0
            await stand.until(lambda: stand.held().elsewhere == 1)
            stand.service.engine.want_suspended("qwen")
            await stand.until(lambda: stand.held().phase == Phase.DRAINING)
            assert stand.models.calls["suspend qwen"] == 0
            stand.upstream.may_end.set()
            assert b"second" in await answer.read()
        await stand.until(lambda: stand.models.calls["suspend qwen"] == 1)


async def test_keys_are_checked_without_python(haproxy: Standing, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice {hashlib.sha256(b'sk-alice').hexdigest()}\n")
    async with haproxy(f"routes: [{{keys: {tmp_path}/keys}}]", phase=Phase.AWAKE) as stand:
        assert (await stand.chat(headers={"Authorization": "Bearer sk-alice"})).status == 200
        assert passed_by_python(stand) == 0
        assert "Authorization" not in stand.upstream.seen[-1]["headers"]
        assert (await stand.chat(headers={"Authorization": "Bearer sk-bob"})).status == 401


@pytest.mark.skipif(shutil.which("curl") is None, reason="this node has no curl")
async def test_curl_speaks_http2(haproxy: Standing) -> None:
    async with haproxy() as stand:
        words = ("--http2-prior-knowledge", "-i", "-H", "Content-Type: application/json", "-d", json.dumps(CHAT))
        for _ in range(2):  # one that wakes, one that HAProxy passes
            status, text = await curl(*words, f"{stand.url}/v1/chat/completions")
            assert status == 0, text
            assert text.startswith("HTTP/2 200")
            await stand.until(lambda: not stand.held().closed)
        assert passed_by_python(stand) == 1


async def test_grpc_streams_and_has_its_trailers(haproxy: Standing) -> None:
    """A server of grpcio behind; the first call wakes it and is repeated by the client's own policy."""

    async def count(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for number in range(3):
            yield b"%d %s" % (number, request)
        context.set_trailing_metadata((("sum", "3"),))

    handler = grpc.unary_stream_rpc_method_handler(count)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Counter", {"Count": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    policy = {"maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2}
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy | {"retryableStatusCodes": ["UNAVAILABLE"]}}]}
    model = f"  counter: {{container: counter, upstream: 'h2://127.0.0.1:{port}'}}"
    more = f"{model}\nroutes: [{{path: /t.Counter, to: counter}}]"
    try:
        async with haproxy(more) as stand:
            options = [("grpc.service_config", json.dumps(config))]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{stand.port}", options=options) as channel:
                for _ in range(2):
                    call = channel.unary_stream("/t.Counter/Count")(b"x", timeout=20)
                    assert [one async for one in call] == [b"0 x", b"1 x", b"2 x"]
                    assert ("sum", "3") in list(await call.trailing_metadata())
            assert stand.models.calls["wake counter"] == 1
    finally:
        await server.stop(0)


async def test_grpc_streams_both_ways_and_its_errors_are_trailers(haproxy: Standing) -> None:
    """Each message is answered before the next one is sent; deadlines and refusals of the server reach the client."""

    async def echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await context.send_initial_metadata((("began", "yes"),))
        async for one in requests:
            if one == b"refuse":
                await context.abort(grpc.StatusCode.NOT_FOUND, "nothing of that name", (("why", "none"),))
            yield b"echo " + one

    handler = grpc.stream_stream_rpc_method_handler(echo)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Echo", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    more = f"  echo: {{upstream: 'h2://127.0.0.1:{port}'}}\nroutes: [{{path: /t.Echo, to: echo}}]"
    try:
        async with haproxy(more) as stand, grpc.aio.insecure_channel(f"127.0.0.1:{stand.port}") as channel:
            await stand.until(lambda: stand.service.plane._wanted["echo"] != ACTIVATOR, "it is passed by HAProxy")
            call = channel.stream_stream("/t.Echo/Echo")(timeout=20)
            for word in (b"one", b"x" * 100_000):
                await call.write(word)
                assert await call.read() == b"echo " + word
            assert ("began", "yes") in list(await call.initial_metadata())
            await call.write(b"refuse")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
            assert refused.value.details() == "nothing of that name"
            assert ("why", "none") in list(refused.value.trailing_metadata())
            silent = channel.stream_stream("/t.Echo/Echo")(timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await silent.read()
            assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        await server.stop(0)


async def test_haproxy_that_is_killed_is_started_again(haproxy: Standing) -> None:
    async with haproxy(phase=Phase.AWAKE) as stand:
        assert stand.service.plane is not None
        first = stand.service.plane.child.pid
        os.kill(first, signal.SIGKILL)
        await stand.until(lambda: stand.service.plane is not None and stand.service.plane.child.pid != first)
        async with aiohttp.ClientSession() as client:

            async def answered() -> bool:
                try:
                    async with client.post(f"{stand.url}/v1/chat/completions", json=CHAT) as answer:
                        return answer.status == 200
                except aiohttp.ClientError:
                    return False

            async with asyncio.timeout(20):
                while not await answered():  # noqa: ASYNC110  (another process, which sets no event)
                    await asyncio.sleep(0.02)
        before = passed_by_python(stand)
        await stand.until(lambda: "proxy.haproxy_killed" in stand.log.getvalue())
        async with asyncio.timeout(20):  # until its map is as it was
            while passed_by_python(stand) != before:
                before = passed_by_python(stand)
                assert (await stand.chat()).status == 200


async def test_restart_of_the_proxy_keeps_streams_and_ends_what_is_held(haproxy: Standing) -> None:
    more = "  llama: {container: llama, upstream: 'http://127.0.0.1:{port}'}\nroutes: [{path: /stream, to: qwen}, {}]"
    async with haproxy(more, phase=Phase.AWAKE) as stand:
        stand.models.change("llama", Phase.ASLEEP)
        await stand.until(lambda: stand.held("llama").phase == Phase.ASLEEP)
        stand.models.may_wake.clear()
        streams = [await stand.client.get(f"{stand.url}/stream") for _ in range(20)]
        for answer in streams:
            assert await answer.content.readline() == b"data: first\n"
        held = [asyncio.create_task(stand.chat(model="llama")) for _ in range(50)]
        await stand.until(lambda: len(stand.held("llama").waiting) == 50)
        settings, pid = stand.service.plane.settings, stand.service.plane.child.pid
        await stand.service.close(drain=1.0, leave=True)
        assert {(one.status, one.headers["Retry-After"]) for one in await asyncio.gather(*held)} == {(503, "10")}
        assert (await stand.chat()).status == 200  # awake models are served without any proxy
        models = FakeModels({"qwen": Phase.AWAKE, "llama": Phase.AWAKE})
        again = await service.start(settings, models, Log(lambda line: None, 0, {}))
        try:
            assert again.plane is not None
            assert again.plane.child.pid == pid
            assert (await stand.chat(model="llama")).status == 200
            stand.upstream.may_end.set()
            for answer in streams:
                assert b"data: second" in await answer.read()
        finally:
            await again.close(drain=0.2)


async def test_names_of_models_change_without_another_haproxy(haproxy: Standing) -> None:
    async with haproxy(model="aliases: [old]", phase=Phase.AWAKE) as stand:
        settings, pid = stand.service.plane.settings, stand.service.plane.child.pid
        await stand.service.close(drain=0.2, leave=True)
        changed = replace(settings, models=(replace(settings.models[0], aliases=("new",)),))
        again = await service.start(changed, FakeModels({"qwen": Phase.AWAKE}), Log(lambda line: None, 0, {}))
        try:
            assert again.plane is not None
            assert again.plane.child.pid == pid
            assert [(await stand.chat(model=name)).status for name in ("new", "old", "qwen")] == [200, 404, 200]
        finally:
            await again.close(drain=0.2)


async def test_changed_settings_hand_the_sockets_over(haproxy: Standing) -> None:
    async with haproxy("routes: [{path: /stream, to: qwen}, {}]", phase=Phase.AWAKE) as stand:
        answer = await stand.client.get(f"{stand.url}/stream")
        assert await answer.content.readline() == b"data: first\n"
        old, pid = stand.service.plane.settings, stand.service.plane.child.pid
        await stand.service.close(drain=0.2, leave=True)
        (model,) = old.models
        named = (replace(model, aliases=("new",)),)
        changed = replace(old, models=named, limits=replace(old.limits, headers=99))
        again = await service.start(changed, FakeModels({"qwen": Phase.AWAKE}), Log(lambda line: None, 0, {}))
        try:
            assert again.plane is not None
            assert again.plane.child.pid != pid
            assert (await stand.chat(model="new")).status == 200
            stand.upstream.may_end.set()
            assert b"data: second" in await answer.read()
        finally:
            await again.close(drain=0.2)
            end(again.plane.child.pid if again.plane is not None else 0)


def test_users_extend_the_configuration_and_see_it(tmp_path: Path) -> None:
    text = f"""
plane: haproxy
listen: 127.0.0.1:{free_port()}
models:
  "odd name/1": {{upstream: "http://127.0.0.1:1", container: c}}
routes: [{{host: it's.example, headers: {{x-a: "'; deny #"}}, to: odd name/1}}]
haproxy:
  state: {tmp_path}
  global: [maxconn 100]
  defaults: [timeout server 2h]
  frontend: [http-request set-header X-Mine 1]
  backends: {{odd name/1: [option httpchk GET /]}}
"""
    config = printed(parse(text))
    for line in ("maxconn 100", "timeout server 2h", "http-request set-header X-Mine 1", "option httpchk GET /"):
        assert f"    {line}\n" in config
    file = tmp_path / "haproxy.cfg"
    file.write_text(config)
    (tmp_path / "models.map").write_text("")
    check(find_binary(), file)
    file.write_text(config.replace("timeout server 2h", "timeout nonsense 2h"))
    with pytest.raises(HaproxyUnusable, match="nonsense"):
        check(find_binary(), file)


def test_backends_have_names_that_haproxy_takes_and_are_each_ones_own() -> None:
    names = ["a b", "a_20_b", "a/b", "ä", "a.b-c:d"]
    assert len({backend_of(name) for name in names}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.:-]+", backend_of(name)) for name in names)
