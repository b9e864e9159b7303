"""google.protobuf.Any in containerd's dialect."""

from __future__ import annotations

import json

import pytest
from google.protobuf.any_pb2 import Any

from kybernate_shim.messages import events_pb2, runc_options_pb2
from kybernate_shim.messages.any import (
    OCI_FEATURES,
    OCI_SPEC,
    pack,
    pack_json,
    type_name,
)


def test_pack_writes_the_bare_message_name() -> None:
    packed = pack(events_pb2.TaskExit(container_id="c", pid=7, exit_status=137))
    assert packed.type_url == "containerd.events.TaskExit"
    assert events_pb2.TaskExit.FromString(packed.value).exit_status == 137


def test_pack_gives_the_bytes_that_containerd_sends() -> None:
    options = runc_options_pb2.CheckpointOptions(file_locks=True)
    assert pack(options).SerializeToString() == b"\x0a\x24containerd.runc.v1.CheckpointOptions\x12\x02\x28\x01"


def test_pack_of_a_default_message_keeps_its_name() -> None:
    assert pack(runc_options_pb2.Options()) == Any(type_url="containerd.runc.v1.Options")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (OCI_SPEC, "Spec"),
        (OCI_FEATURES, "Features"),
    ],
)
def test_pack_json_keeps_the_kind_and_the_object(kind: str, name: str) -> None:
    obj = {"args": ["sh", "-c", "echo ü"], "terminal": False}
    packed = pack_json(kind, obj)
    assert packed.type_url == kind
    assert type_name(packed) == name
    assert json.loads(packed.value) == obj


@pytest.mark.parametrize(
    ("type_url", "name"),
    [
        ("containerd.runc.v1.Options", "containerd.runc.v1.Options"),
        ("type.googleapis.com/containerd.runc.v1.Options", "containerd.runc.v1.Options"),
        ("/containerd.runc.v1.Options", "containerd.runc.v1.Options"),
        ("types.containerd.io/opencontainers/runtime-spec/1/Process", "Process"),
        ("Process", "Process"),
        ("", ""),
    ],
)
def test_type_name_ignores_every_prefix(type_url: str, name: str) -> None:
    assert type_name(Any(type_url=type_url)) == name
