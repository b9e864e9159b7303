"""Clients that people use, unmodified: OpenAI's and Anthropic's packages, curl, and readers of server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import shutil

import anthropic
import openai
import pytest

from kybernate.proxy.holding import Phase
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
        called = await client.chat.completions.create(model="qwen", messages=MESSAGES, tools=[tool])
        assert stand.upstream.seen[-1]["json"]["tools"] == [tool]
        assert [one.function.name for one in called.choices[0].message.tool_calls] == ["f"]
        found = await client.embeddings.create(model="qwen", input="a", encoding_format="float")
        assert stand.upstream.seen[-1]["path"] == "/v1/embeddings"
        assert found.data[0].embedding == [0.5, 0.25]
        await client.responses.create(model="qwen", input="hello")
        assert stand.upstream.seen[-1]["path"] == "/v1/responses"


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


async def test_anthropic_streams_and_calls_tools(standing_proxy: Standing) -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
    async with standing_proxy() as stand:
        client = anthropic.AsyncAnthropic(base_url=stand.url, api_key="sk-test", max_retries=0)
        asked = {"model": "qwen", "max_tokens": 9, "messages": MESSAGES}
        async with client.messages.stream(**asked) as stream:
            assert "".join([text async for text in stream.text_stream]) == "hello"
        called = await client.messages.create(**asked, tools=[tool])
        assert [(one.type, one.name, one.input) for one in called.content] == [("tool_use", "f", {"a": 1})]
        stand.models.change("qwen", Phase.ABSENT)
        await stand.until(lambda: stand.held().phase == Phase.ABSENT)
        with pytest.raises(anthropic.APIStatusError, match="does not exist") as absent:
            await client.messages.create(**asked)
        assert (absent.value.status_code, absent.value.body["error"]["type"]) == (503, "overloaded_error")
        await client.close()


async def test_langchain_asks_streams_calls_tools_and_embeds(standing_proxy: Standing) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings  # two seconds, which other tests need not wait for

    def add(a: int) -> int:
        """Add one."""
        return a + 1

    async with standing_proxy() as stand:
        access = {"model": "qwen", "base_url": f"{stand.url}/v1", "api_key": "sk-test", "max_retries": 0}
        model = ChatOpenAI(**access)
        assert (await model.ainvoke("hello")).content == "hello"
        assert stand.models.calls["wake qwen"] == 1
        assert [chunk.content async for chunk in model.astream("hello") if chunk.content] == ["hel", "lo"]
        called = await model.bind_tools([add]).ainvoke("add")
        assert [(one["name"], one["args"]) for one in called.tool_calls] == [("add", {"a": 1})]
        embeddings = OpenAIEmbeddings(**access, check_embedding_ctx_length=False)  # which asks the network for a table
        assert await embeddings.aembed_query("a") == [0.5, 0.25]
        stand.models.change("qwen", Phase.ABSENT)
        await stand.until(lambda: stand.held().phase == Phase.ABSENT)
        with pytest.raises(openai.InternalServerError, match="does not exist"):
            await model.ainvoke("hello")


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


@pytest.mark.skipif(shutil.which("curl") is None, reason="this node has no curl")
async def test_curl_that_offers_http2_is_answered(standing_proxy: Standing) -> None:
    """By HTTP/1.1, since neither plane upgrades a connection to h2c; what it offered is not passed on."""
    async with standing_proxy() as stand:
        words = ("--http2", "-i", "-H", "Content-Type: application/json", "-d", json.dumps(CHAT))
        for _ in range(2):
            status, text = await curl(*words, f"{stand.url}/v1/chat/completions")
            assert (status, text.startswith("HTTP/1.1 200")) == (0, True), text
            names = {name.lower() for name in stand.upstream.seen[-1]["names"]}
            assert not names & {"upgrade", "http2-settings"}
