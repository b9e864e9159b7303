"""Routes and keys that change while requests run, as they do on SIGHUP."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.node.failure import Invalid
from kybernate.proxy.haproxy.child import HaproxyUnusable
from kybernate.proxy.holding import Phase
from kybernate.proxy.settings import Route
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import Stand, standing


async def status_of(stand: Stand, path: str) -> int:
    async with stand.client.get(f"{stand.url}{path}") as answer:
        await answer.read()
        return answer.status


def keys_of(*names: str) -> str:
    return "".join(f"{name} {hashlib.sha256(f'sk-{name}'.encode()).hexdigest()}\n" for name in names)


async def test_routes_change_while_streams_run_and_requests_wait(standing_proxy: Standing) -> None:
    more = "  llama: {container: llama, upstream: 'http://127.0.0.1:{port}'}\nroutes: [{path: /stream, to: qwen}, {}]"
    async with standing_proxy(more, phase=Phase.AWAKE) as stand:
        stand.models.change("llama", Phase.ASLEEP)
        await stand.until(lambda: stand.held("llama").phase == Phase.ASLEEP and stand.held("llama").closed)
        stand.models.may_wake.clear()
        waits = asyncio.create_task(stand.chat(model="llama"))
        await stand.until(lambda: len(stand.held("llama").waiting) == 1)
        async with stand.client.get(f"{stand.url}/stream") as answer:
            assert await answer.content.readline() == b"data: first\n"
            assert await status_of(stand, "/status?code=204") == 404
            settings = stand.service.rules.settings
            await stand.service.change(replace(settings, routes=(Route(paths=("/status",), to="qwen"),)))
            assert await status_of(stand, "/status?code=204") == 204
            assert await status_of(stand, "/stream") == 404
            stand.upstream.may_end.set()
            assert b"second" in await answer.read()
        stand.models.may_wake.set()
        assert (await waits).status == 200


async def test_key_that_was_taken_out_of_its_file_is_none(standing_proxy: Standing, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(keys_of("alice", "bob"))
    async with standing_proxy(f"routes: [{{keys: {file}}}]", phase=Phase.AWAKE) as stand:

        async def allowed() -> list[int]:
            names = ("alice", "bob", "carol")
            return [(await stand.chat(headers={"Authorization": f"Bearer sk-{name}"})).status for name in names]

        assert await allowed() == [200, 200, 401]
        file.write_text(keys_of("alice", "carol"))
        await stand.service.change(stand.service.rules.settings)
        assert await allowed() == [200, 401, 200]
        file.write_text("no key at all")
        with pytest.raises(Invalid, match="SHA-256"):
            await stand.service.change(stand.service.rules.settings)
        assert await allowed() == [200, 401, 200]


async def test_what_was_counted_for_a_quota_counts_after_a_change(standing_proxy: Standing, tmp_path: Path) -> None:
    """For each key and route: others have their own, and of a quota that was raised, what was used stays used."""
    file = tmp_path / "keys"
    file.write_text(keys_of("alice", "bob"))
    routes = f"routes: [{{path: /status, to: qwen, keys: {file}, quota: 2}}, {{path: /other, to: qwen, quota: 1}}]"
    async with standing_proxy(routes, phase=Phase.AWAKE) as stand:

        async def statuses(name: str, path: str, count: int) -> list[int]:
            found = []
            for _ in range(count):
                headers = {"Authorization": f"Bearer sk-{name}"}
                async with stand.client.get(f"{stand.url}{path}", headers=headers) as answer:
                    found.append(answer.status)
            return found

        assert await statuses("alice", "/status?code=204", 3) == [204, 204, 429]
        assert await statuses("alice", "/other", 2) == [200, 429]
        settings = stand.service.rules.settings
        first, second = settings.routes
        await stand.service.change(replace(settings, routes=(second, replace(first, quota=3))))
        assert await statuses("alice", "/status?code=204", 1) == [429]
        assert await statuses("alice", "/other", 1) == [429]
        assert await statuses("bob", "/status?code=204", 4) == [204, 204, 204, 429]
        await stand.service.change(replace(settings, routes=(first, replace(second, paths=("/more",)))))
        assert await statuses("alice", "/more", 2) == [200, 429]


async def test_what_cannot_change_is_named_and_nothing_changes(standing_proxy: Standing) -> None:
    async with standing_proxy("routes: [{path: /status, to: qwen}]", phase=Phase.AWAKE) as stand:
        settings = stand.service.rules.settings
        (model,) = settings.models
        changed = replace(settings, models=(replace(model, idle=1.0),), routes=(Route(to="qwen"),))
        with pytest.raises(Invalid, match="models cannot change"):
            await stand.service.change(changed)
        assert await status_of(stand, "/other") == 404


async def test_model_with_streams_of_an_earlier_haproxy_is_not_suspended(tmp_path: Path) -> None:
    more = "routes: [{path: /stream, to: qwen}]"
    async with standing(more, plane="haproxy", place=tmp_path, phase=Phase.AWAKE, model="drain: 1m") as stand:
        plane = stand.service.plane
        assert plane is not None
        pid = plane.child.pid
        async with stand.client.get(f"{stand.url}/stream") as answer:
            assert await answer.content.readline() == b"data: first\n"
            await stand.service.change(replace(stand.service.rules.settings, routes=(Route(to="qwen"),)))
            assert plane.child.pid != pid
            stand.service.engine.want_suspended("qwen")
            await stand.until(lambda: stand.held().phase == Phase.DRAINING and stand.held().closed)
            await stand.until(lambda: stand.held().elsewhere == 1)
            assert stand.models.calls["suspend qwen"] == 0
            stand.upstream.may_end.set()
            assert b"second" in await answer.read()
        await stand.until(lambda: stand.models.calls["suspend qwen"] == 1)


async def test_routes_that_haproxy_does_not_accept_change_nothing(tmp_path: Path) -> None:
    more = "routes: [{path: /status, to: qwen}]"
    async with standing(more, plane="haproxy", place=tmp_path, phase=Phase.AWAKE) as stand:
        assert stand.service.plane is not None
        pid = stand.service.plane.child.pid
        wrong = Route(to="qwen", headers={"a'b": "x"})
        with pytest.raises(HaproxyUnusable):
            await stand.service.change(replace(stand.service.rules.settings, routes=(wrong,)))
        assert stand.service.plane.child.pid == pid
        assert await status_of(stand, "/status?code=204") == 204
        assert await status_of(stand, "/other") == 404
