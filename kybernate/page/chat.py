"""The playground: a chat with a model through Kybernate's proxy, whose answer streams as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import httpx

from kybernate.node.failure import Failure
from kybernate_shim import bounded_json

WAKE_SECONDS: Final = 300.0  # for the first byte: the model may have to wake
CONNECT_SECONDS: Final = 5.0
TOKENS: Final = 1024  # of an answer
LIST_SECONDS: Final = 2.0
LIST_BYTES: Final = 4 << 20
MODELS: Final = 2_000  # that are listed


class ChatRefused(Failure):
    """The proxy did not answer the chat, or refused it."""


class Chat:
    """Asks the proxy at `url`, with `key` where it wants one."""

    def __init__(self, url: str, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(WAKE_SECONDS, connect=CONNECT_SECONDS)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, follow_redirects=False)

    async def models(self) -> list[str]:
        """Return the names of the proxy's models, none where it does not say: the list is a help for typing alone."""
        try:
            async with self._client.stream("GET", "/v1/models", timeout=LIST_SECONDS) as response:
                found = bounded_json.parse(await _beginning(response, LIST_BYTES), most_values=100_000)
                return [str(one["id"])[:200] for one in found["data"]][:MODELS]
        except (httpx.HTTPError, ValueError, TypeError, KeyError):
            return []

    async def ask(self, body: bytes) -> AsyncIterator[bytes]:
        """Yield the proxy's stream of events for {"model": …, "messages": […]}. Raises ChatRefused."""
        try:
            asked = bounded_json.parse(body, most_values=10_000)
            request = {
                "model": str(asked["model"])[:200],
                "messages": [{"role": str(one["role"]), "content": str(one["content"])} for one in asked["messages"]],
                "stream": True,
                "max_tokens": TOKENS,
            }
        except (ValueError, TypeError, KeyError) as error:
            raise ChatRefused('a chat is {"model": NAME, "messages": [{"role": ROLE, "content": TEXT}]}') from error
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=request) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await _beginning(response)).decode("utf-8", "replace")
                    raise ChatRefused(f"the proxy answered {response.status_code}: {text}")
                async for part in response.aiter_raw():
                    yield part
        except httpx.HTTPError as error:
            raise ChatRefused(f"the proxy at {self._client.base_url} does not answer: {error}") from error


async def _beginning(response: httpx.Response, most: int = 2000) -> bytes:
    text = b""
    async for part in response.aiter_bytes():
        text += part
        if len(text) >= most:
            break
    return text[:most]
