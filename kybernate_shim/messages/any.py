"""google.protobuf.Any as containerd writes it: the type's bare name, without the prefix of protobuf's own Any.Pack.

containerd's receivers compare the name as a whole string, so `type.googleapis.com/` before it makes them refuse
statistics, events and options. What arrives may carry any prefix and is accepted. Structures of the OCI runtime
specification travel as JSON under a name of their own.
"""

from __future__ import annotations

import json

from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message

OCI_SPEC = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
OCI_FEATURES = "types.containerd.io/opencontainers/runtime-spec/1/features/Features"


def pack(message: Message) -> Any:
    """Wrap `message` under its full name, for example `containerd.events.TaskExit`."""
    return Any(type_url=message.DESCRIPTOR.full_name, value=message.SerializeToString())


def pack_json(kind: str, obj: object) -> Any:
    """Wrap `obj` as JSON under `kind`, one of the OCI names above."""
    return Any(type_url=kind, value=json.dumps(obj, separators=(",", ":"), ensure_ascii=False).encode())


def type_name(packed: Any) -> str:
    """Return the text after the last slash: a message's full name, an OCI structure's short one, or "" for no type."""
    return packed.type_url.rpartition("/")[2]
