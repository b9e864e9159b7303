"""Requests to the agent, made from Python's values. Without I/O; both clients share them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypedDict

from google.protobuf.duration_pb2 import Duration

from kybernate.messages import agent_pb2 as wire

SERVICE = "/kybernate.node.v1."  # and Service/Method
FINAL = frozenset({wire.SUCCEEDED, wire.FAILED, wire.CANCELLED})


def options(key: str, deadline: float, labels: Mapping[str, str] | None) -> wire.Options:
    """Return what every operation takes. Without a key of the caller's, a retry of this very call has the same one."""
    return wire.Options(idempotency_key=key or str(uuid.uuid4()), deadline=duration(deadline), labels=labels or {})


def duration(seconds: float) -> Duration | None:
    """Return a duration; None for 0, which means as configured."""
    if not seconds:
        return None
    message = Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def has_ended(operation: wire.Operation) -> bool:
    """Return whether the state of an operation is final."""
    return operation.state in FINAL


class ImageFilters(TypedDict, total=False):
    """What a list of images may be limited to; see ListImagesRequest."""

    namespace: str
    pod: str
    workload: str
    source_image: str
    tier: str
    labels: Mapping[str, str]
    pinned: bool


class Pages:
    """Goes through the pages of a list of images, up to `limit` of them where it is not 0."""

    def __init__(self, limit: int, filters: ImageFilters) -> None:
        self._left = limit
        self._filters = filters
        self._token: str | None = ""

    def next_request(self) -> wire.ListImagesRequest | None:
        """Return the request for the next page; None at the end."""
        if self._token is None:
            return None
        return wire.ListImagesRequest(limit=self._left, page_token=self._token, **self._filters)

    def take(self, answer: wire.ListImagesResponse) -> Sequence[wire.Image]:
        """Return the images of a page, without those beyond the limit."""
        images = answer.images[: self._left] if self._left else answer.images
        enough = self._left and len(images) == self._left
        self._token = None if enough else answer.next_page_token or None
        self._left -= len(images) if self._left else 0
        return images


class Backoff:
    """How long to wait before the next attempt to reach an agent that is being started again."""

    FIRST, MOST, PATIENCE = 0.1, 2.0, 60.0  # seconds

    def __init__(self) -> None:
        self._wait = self.FIRST
        self._since: float | None = None

    def reset(self) -> None:
        """Note that the agent has answered."""
        self._wait, self._since = self.FIRST, None

    def next_or_raise(self, now: float) -> float:
        """Return the seconds to wait. Called where an error is handled, which is raised again after PATIENCE."""
        self._since = now if self._since is None else self._since
        if now - self._since > self.PATIENCE:
            raise  # the error that the caller handles
        wait, self._wait = self._wait, min(2 * self._wait, self.MOST)
        return wait
