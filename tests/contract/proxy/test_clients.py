"""Clients that people use, unmodified: OpenAI's and Anthropic's packages, curl, and readers of server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import shutil

import anthropic
import openai
import pytest

from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import CHAT, Stand

MESSAGES = [{"role": "user", "content": "hello"}]


def openai_client(stand: Stand, **more: float) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="sk-test", max_retries=0, **more)


async def test_openai_streams_a_completion_of_a_sleeping_model(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand, openai_client(stand) as client:
        words = []
        async for chunk in await client.chat.completions.create(model="qwen", messages=MESSAGES, stream=True):
            words.append(chunk.choices[0].delta.content)
        assert "".join(words) == "hello"


async def test_openai_reads_progress_as_reasoning_or_ignores_it(standing_proxy: Standing) -> None:
    for progress in ("comments", "chunks"):
        settings = f"progress: {progress}\nprogress_every: 100ms"
        async with standing_proxy(model=settings) as stand, openai_client(stand) as client:
            stand.models.may_wake.clear()
            asyncio.get_running_loop().call_later(0.3, stand.models.may_wake.set)
            stream = await client.chat.completions.create(model="qwen", messages=MESSAGES, stream=True)
            words = [chunk.choices[0].delta.content async for chunk in stream]
            assert "".join(word or "" for word in words) == "hello"


async def test_openai_calls_tools_and_embeddings(standing_proxy: Standing) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with standing_proxy() as stand, openai_client(stand) as client:
        await client.chat.completions.create(model="qwen", messages=MESSAGES, tools=[tool])
        assert stand.upstream.seen[-1]["json"]["tools"] == [tool]
        await client.post("/embeddings", body={"model": "qwen", "input": ["a", "b"]}, cast_to=object)
        assert stand.upstream.seen[-1]["path"] == "/v1/embeddings"


async def test_openai_uploads_audio(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand, openai_client(stand) as client:
        sound = b"RIFF" + bytes(200_000)
        await client.audio.transcriptions.create(model="qwen", file=("a.wav", sound), response_format="json")
        assert sound in stand.upstream.seen[-1]["body"]


async def test_openai_lists_models(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand, openai_client(stand) as client:
        assert [one.id async for one in await client.models.list()] == ["qwen"]
        assert (await client.models.retrieve("qwen")).owned_by == "kybernate"


async def test_openai_knows_each_error_by_its_class(standing_proxy: Standing) -> None:
    async with standing_proxy(model="queue: {age: 200ms}") as stand, openai_client(stand) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
            await client.chat.completions.create(model="none", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        stand.models.failure = "no room"
        with pytest.raises(openai.InternalServerError, match="no room") as failed:
            await client.chat.completions.create(model="qwen", messages=MESSAGES)
        assert failed.value.status_code == 503


async def test_openai_retries_after_a_wake_that_failed(standing_proxy: Standing) -> None:
    """By Retry-After: its own retries are enough, and its user sees no error."""
    async with standing_proxy(model="retry_after: 100ms") as stand:
        client = openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="sk-test", max_retries=3)
        stand.models.failure = "no room"
        task = asyncio.create_task(client.chat.completions.create(model="qwen", messages=MESSAGES))
        await stand.until(lambda: stand.held().failure == "no room")
        stand.models.failure = ""
        await task
        await client.close()


async def test_anthropic_sends_messages(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        client = anthropic.AsyncAnthropic(base_url=stand.url, api_key="sk-test", max_retries=0)
        await client.messages.create(model="qwen", max_tokens=9, messages=[{"role": "user", "content": "hello"}])
        assert stand.upstream.seen[-1]["path"] == "/v1/messages"
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(model="none", max_tokens=9, messages=[{"role": "user", "content": "x"}])
        assert [one.id async for one in client.models.list()] == ["qwen"]
        await client.close()


async def curl(*words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--show-error", "--max-time", "30", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="this node has no curl")
async def test_curl_wakes_uploads_and_streams(standing_proxy: Standing) -> None:
    async with standing_proxy() as stand:
        url = f"{stand.url}/v1/chat/completions"
        json_type = ("-H", "Content-Type: application/json", "-d")
        status, text = await curl("-i", url, *json_type, json.dumps(CHAT))
        assert status == 0
        assert re.search(r"(?i)^x-kybernate-wake-ms: \d+", text, re.MULTILINE)
        status, text = await curl(
            url, *json_type, json.dumps(CHAT | {"text": "x" * 5000}), "-H", "Expect: 100-continue"
        )
        assert (status, json.loads(text)["got"]["model"]) == (0, "qwen")
        status, text = await curl("-N", url, *json_type, json.dumps(CHAT | {"stream": True}))
        assert (status, text.rstrip().endswith("[DONE]")) == (0, True)
        status, text = await curl(
            "-F", "model=qwen", "-F", "file=@/etc/hostname", f"{stand.url}/v1/audio/transcriptions"
        )
        assert (status, "path" in text) == (0, True)
