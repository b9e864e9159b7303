"""Keys of the settings that no other test here asks by a real request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import CHAT

TO_QWEN = "routes: [{to: qwen}]"
OTHER = "  llama: {upstream: 'http://127.0.0.1:{port}', upstream_model: other}\n"


async def test_weights_choose_in_their_proportions(standing_proxy: Standing) -> None:
    """By those that leave nothing to chance, and by one that does."""
    settings = OTHER + (
        "selectors:\n  never: {choose: weights, of: [qwen, llama], weights: [0, 1]}\n"
        "  mixed: {choose: weights, of: [qwen, llama], weights: [1, 1]}"
    )
    async with standing_proxy(settings, phase=Phase.AWAKE) as stand:
        for _ in range(8):
            assert (await stand.chat(model="never")).status == 200
        assert {one["json"]["model"] for one in stand.upstream.seen} == {"other"}
        for _ in range(60):  # one of them is never chosen once in 2 to the power of 59 times
            assert (await stand.chat(model="mixed")).status == 200
        assert {one["json"]["model"] for one in stand.upstream.seen[8:]} == {"mixed", "other"}


async def test_access_log_has_a_line_for_each_request(standing_proxy: Standing, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    async with standing_proxy("routes: [{quota: 3}]", top=f"access_log: {log}") as stand:
        await stand.chat(headers={"X-Request-Id": "one"})
        await stand.client.get(f"{stand.url}/v1/models?secret=1")
        await stand.chat(model="none")
        assert (await stand.chat()).status == 429
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [(one["status"], one["model"], one["reason"]) for one in lines] == [
            (200, "qwen", ""), (200, "", ""), (404, "", "model_not_found"), (429, "", "rate_limit_exceeded"),
        ]  # fmt: skip
        assert (lines[0]["id"], lines[0]["cold"], lines[0]["client"]) == ("one", True, "127.0.0.1")
        assert "secret" not in log.read_text()


async def test_administrator_sees_states_and_suspends(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, top="admin: 127.0.0.1:0", phase=Phase.AWAKE) as stand:
        admin = f"http://127.0.0.1:{stand.service.admin_port}"
        assert (await stand.client.get(f"{admin}/health")).status == 200
        state = await (await stand.client.get(f"{admin}/state")).json(content_type=None)
        assert (state["qwen"]["state"], state["qwen"]["waiting"]) == ("awake", 0)
        assert (await stand.client.get(f"{admin}/suspend/qwen")).status == 404
        assert (await stand.client.post(f"{admin}/suspend/none")).status == 404
        assert (await stand.client.post(f"{admin}/suspend/qwen")).status == 202
        await stand.until(lambda: stand.models.calls["suspend qwen"] == 1)
        text = await (await stand.client.get(f"{admin}/metrics")).text()
        assert "kybernate_proxy_model_state" in text


async def test_heads_are_limited_as_configured(standing_proxy: Standing) -> None:
    settings = "limits: {head_line: 2KiB, headers: 20}"
    async with standing_proxy(TO_QWEN, top=settings, phase=Phase.AWAKE) as stand:
        assert (await stand.client.get(f"{stand.url}/x", headers={"X-A": "a" * 1000})).status == 200
        many = "".join(f"X-{number}: a\r\n" for number in range(40))
        answer = await stand.raw(f"GET / HTTP/1.1\r\nHost: h\r\n{many}Connection: close\r\n\r\n".encode())
        assert not answer or answer.split(b" ")[1] in (b"400", b"431")
        assert len(stand.upstream.seen) == 1
        if stand.plane == "embedded":  # HAProxy has one limit for the whole head, that of its buffer
            long = await stand.raw(b"GET / HTTP/1.1\r\nHost: h\r\nX-A: " + b"a" * 3000 + b"\r\n\r\n")
            assert long.split(b" ")[1] in (b"400", b"431")


async def test_model_is_looked_for_in_the_first_bytes_alone(standing_proxy: Standing) -> None:
    async with standing_proxy(top="limits: {prefix: 4KiB}", phase=Phase.AWAKE) as stand:
        late = {"text": "x" * 200_000, **CHAT}
        answer = await stand.client.post(f"{stand.url}/v1/chat/completions", json=late)
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "model_missing")
        early = CHAT | {"text": "x" * 200_000}
        assert (await stand.client.post(f"{stand.url}/v1/chat/completions", json=early)).status == 200


async def test_body_that_filters_change_is_limited(standing_proxy: Standing) -> None:
    settings = "filters: {set: {n: 1}}"
    async with standing_proxy(model=settings, top="limits: {filtered: 4KiB}", phase=Phase.AWAKE) as stand:
        assert (await stand.chat(text="x" * 1000)).status == 200
        assert (await stand.chat(text="x" * 5000)).status == 413
        assert len(stand.upstream.seen) == 1


async def test_connection_without_a_request_is_closed(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, top="limits: {idle_seconds: 200ms}", phase=Phase.AWAKE) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")  # it ends only because the proxy closes
        writer.close()


async def test_place_and_seconds_left_are_shown_in_both_forms(standing_proxy: Standing) -> None:
    """The seconds are those that the last wake has taken, less those that this one has."""
    for form, of in (("comments", ": waiting, place {}, "), ("chunks", "place {}, ")):
        settings = f"progress: {form}\nprogress_every: 100ms\nconcurrency: 1"
        async with standing_proxy(model=settings) as stand:
            assert (await stand.chat()).status == 200
            stand.models.change("qwen", Phase.ASLEEP)
            await stand.until(lambda stand=stand: stand.held().phase == Phase.ASLEEP)
            stand.service.engine._last_wake["qwen"] = 100.0
            stand.models.may_wake.clear()
            answers = []
            for place in (1, 2, 3):
                body = CHAT | {"stream": True}
                answers.append(await stand.client.post(f"{stand.url}/v1/chat/completions", json=body))
                line = (await answers[-1].content.readline()).decode()
                assert of.format(place) in line
                assert "about 100 s left" in line or "about 99 s left" in line
            stand.models.may_wake.set()
            for answer in answers:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_names_of_anthropic_and_azure_carry_keys_as_well(standing_proxy: Standing, tmp_path: Path) -> None:
    from hashlib import sha256

    (tmp_path / "keys").write_text(f"alice {sha256(b'sk-alice').hexdigest()}  # hers\n\n")
    async with standing_proxy(f"routes: [{{keys: {tmp_path}/keys}}]", phase=Phase.AWAKE) as stand:
        for name in ("x-api-key", "api-key"):
            assert (await stand.chat(headers={name: "sk-alice"})).status == 200
            assert name not in {one.lower() for one in stand.upstream.seen[-1]["names"]}
            assert (await stand.chat(headers={name: "sk-bob"})).status == 401
