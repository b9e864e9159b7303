"""The few calls of the cluster's API that the agent makes, over httpx: create, patch, list and watch of JSON objects.

No client library: those of Kubernetes bring models of hundreds of kinds and an event loop or threads of their own, for
four requests here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from kybernate.agent.kubernetes.access import Access
from kybernate.node.failure import Failure, Invalid
from kybernate_shim import __version__, bounded_json

if TYPE_CHECKING:
    import httpx

CALL_SECONDS: Final = 10.0
WATCH_SECONDS: Final = 120  # that the server keeps a watch; a connection that broke unseen lasts no longer
GRACE_SECONDS: Final = 30.0  # for the end of one
MOST_ANSWER: Final = 64 << 20  # bytes of one list
MOST_LINE: Final = 4 << 20  # bytes of one change; an object has 1.5 MiB at most
PAGE: Final = 250
UNAUTHORIZED, GONE, TOO_MANY = 401, 410, 429
PATCH: Final = "application/strategic-merge-patch+json"

Object = dict[str, Any]


class ApiUnreachable(Failure):
    """The API server does not answer, or its answer cannot be read. Nothing is known of what the call has done."""

    advice = "the agent tries again by itself; containers and operations do not depend on it"


class ApiRefused(Failure):
    """The API server has refused a call. `status` is that of HTTP, 0 where it gave none."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def temporary(self) -> bool:
        """Whether the same call may succeed soon: the server is busy or starting, or the token is replaced just now."""
        return self.status >= 500 or self.status in (0, UNAUTHORIZED, TOO_MANY)


class Api:
    """A connection to an API server, made when it is first needed. Calls raise ApiUnreachable and ApiRefused."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._client: httpx.AsyncClient | None = None

    async def create(self, path: str, body: Object) -> Object:
        """POST an object."""
        return await self._call("POST", path, body, "application/json")

    async def patch(self, path: str, body: Object) -> Object:
        """PATCH some of an object's fields."""
        return await self._call("PATCH", path, body, PATCH)

    async def list(self, path: str, fields: str) -> tuple[list[Object], str]:
        """Return the objects that a field selector chooses, and the revision of the list."""
        found: list[Object] = []
        query: dict[str, str | int] = {"fieldSelector": fields, "limit": PAGE}
        while True:
            page = await self._call("GET", path, query=query)
            found += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion", ""))
            query["continue"] = str(metadata["continue"])

    async def watch(self, path: str, fields: str, revision: str) -> AsyncGenerator[tuple[str, Object], None]:
        """Yield changes after `revision`, with their kinds (ADDED, MODIFIED, DELETED), until the server ends it.

        The iterator has to be closed by `aclosing`. Raises ApiRefused with GONE where the revision is too old.
        """
        query: dict[str, str | int] = {
            "fieldSelector": fields, "watch": "1", "allowWatchBookmarks": "true", "resourceVersion": revision,
            "timeoutSeconds": WATCH_SECONDS,
        }  # fmt: skip
        async with (
            self._stream("GET", path, query=query, quiet=WATCH_SECONDS + GRACE_SECONDS) as answer,
            aclosing(_lines(answer)) as lines,
        ):
            async for line in lines:
                change = _object(line)
                found = change.get("object")
                if change.get("type") == "ERROR":
                    status = found if isinstance(found, dict) else {}
                    raise ApiRefused(str(status.get("message", "the watch has ended")), int(status.get("code") or 0))
                if isinstance(found, dict):
                    yield str(change.get("type")), found

    async def close(self) -> None:
        """End all connections; the next call makes a new one."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    # ---- over HTTP

    async def _call(
        self, method: str, path: str, body: Object | None = None, kind: str = "",
        query: Mapping[str, str | int] | None = None,
    ) -> Object:  # fmt: skip
        async with self._stream(method, path, body, kind, query) as answer:
            content = bytearray()
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > MOST_ANSWER:
                    raise ApiUnreachable(f"{method} {path}: the answer has more than {MOST_ANSWER} bytes")
            return _object(bytes(content))

    @asynccontextmanager
    async def _stream(
        self, method: str, path: str, body: Object | None = None, kind: str = "",
        query: Mapping[str, str | int] | None = None, quiet: float = CALL_SECONDS,
    ) -> AsyncIterator[httpx.Response]:  # fmt: skip
        import httpx

        try:
            client = self._connected()
            headers = {"Content-Type": kind} if kind else {}
            if token := self.access.bearer():
                headers["Authorization"] = f"Bearer {token}"
            content = json.dumps(body).encode() if body is not None else None
            timeout = httpx.Timeout(CALL_SECONDS, read=quiet)
            async with client.stream(
                method, path, params=query, content=content, headers=headers, timeout=timeout
            ) as answer:
                if not answer.is_success:
                    raise ApiRefused(f"{method} {path}: {await _reason(answer)}", answer.status_code)
                yield answer
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, Invalid) as error:  # of a token, too
            await self.close()  # the next one reads the certificates again
            raise ApiUnreachable(f"{self.access.server}: {str(error) or type(error).__name__}") from error

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx  # loaded where there is an API server to call

            # Neither a proxy nor credentials from the environment: the configuration alone says where this goes.
            self._client = httpx.AsyncClient(
                base_url=self.access.server,
                verify=self.access.tls(),
                follow_redirects=False,
                trust_env=False,
                headers={"User-Agent": f"kybernate-agent/{__version__}", "Accept": "application/json"},
            )
        return self._client


async def _lines(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > MOST_LINE:
            raise ApiUnreachable(f"a change has more than {MOST_LINE} bytes")


async def _reason(answer: httpx.Response) -> str:
    """Return the API server's words for a refusal."""
    content = bytearray()
    async for part in answer.aiter_bytes():
        content += part[: (1 << 16) - len(content)]
    try:
        return str(_object(bytes(content)).get("message") or f"status {answer.status_code}")
    except ApiUnreachable:
        return f"status {answer.status_code}"


def _object(content: bytes) -> Object:
    try:
        found = bounded_json.parse(content)
    except ValueError as error:
        raise ApiUnreachable("the API server's answer is not JSON") from error
    if not isinstance(found, dict):
        raise ApiUnreachable("the API server's answer is not an object")
    return found
