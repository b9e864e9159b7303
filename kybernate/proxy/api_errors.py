"""Errors in the form of the API that was called, so that clients show their reason and obey Retry-After."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil
from typing import Final

JSON: Final = "application/json"
ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
OPENAI_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error",
}  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """Why a request is not passed on. `reason` is one word for programs and metrics, `retry_after` seconds or 0."""

    status: int
    reason: str
    message: str
    retry_after: float = 0.0

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(max(1, ceil(self.retry_after)))} if self.retry_after else {}


def api_of(path: str, anthropic: bool = False) -> str:
    """Return whose form an answer has, by the request's path: "anthropic", "openai", or "" for plain text."""
    if anthropic or path.startswith("/v1/messages"):
        return "anthropic"
    return "openai" if path.startswith("/v1/") else ""


def body_of(refusal: Refusal, api: str, request_id: str) -> tuple[bytes, str]:
    """Return the body of an answer and its content type."""
    if not api:
        return f"{refusal.message}\n".encode(), "text/plain; charset=utf-8"
    return json.dumps(_content(refusal, api, request_id)).encode(), JSON


def event_of(refusal: Refusal, api: str, request_id: str) -> bytes:
    """Return the same as an event of a stream whose answer has begun."""
    content = json.dumps(_content(refusal, api or "openai", request_id))
    return f"{'event: error' + chr(10) if api == 'anthropic' else ''}data: {content}\n\n".encode()


def _content(refusal: Refusal, api: str, request_id: str) -> dict[str, object]:
    if api == "anthropic":
        kind = ANTHROPIC_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        return {
            "type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": request_id,
        }  # fmt: skip
    kind = OPENAI_TYPES.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    error = {"message": refusal.message, "type": kind, "param": None, "code": refusal.reason}
    if refusal.reason == "model_not_found":
        error["param"] = "model"
    return {"error": error}
