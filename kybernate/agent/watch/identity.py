"""Which object a message of the agent is about: its kind and its key. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from kybernate.messages import agent_pb2 as api

KEYS: dict[type[Message], tuple[str, Callable[[Any], str]]] = {
    api.Container: ("container", lambda one: f"{one.namespace}/{one.id}"),
    api.Gpu: ("gpu", lambda one: one.uuid),
    api.Operation: ("operation", lambda one: one.id),
    api.Image: ("image", lambda one: one.id or one.name),
    api.Tier: ("tier", lambda one: one.name),
    api.Seat: ("seat", lambda one: one.name),
    api.Event: ("event", lambda one: str(one.id)),
}
KINDS = tuple(kind for kind, _ in KEYS.values())  # also the names of the fields of a Change


def identity(message: Message) -> tuple[str, str]:
    """Return kind and key of a message. Raises TypeError for one that is no object."""
    try:
        kind, key = KEYS[type(message)]
    except KeyError:
        raise TypeError(f"{type(message).__name__} is none of {', '.join(KINDS)}") from None
    return kind, key(message)
