"""The generated messages: they are what proto/ says, and their bytes are those seen between containerd and a shim."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.messages import (
    content_pb2_grpc,
    cri_images_pb2_grpc,
    cri_runtime_pb2_grpc,
    tasks_pb2_grpc,
)
from kybernate_shim.messages import (
    bootstrap_pb2,
    linux_runc_options_pb2,
    runc_options_pb2,
    runtime_options_pb2,
    task_pb2,
)
from kybernate_shim.ttrpc import ttrpc_pb2
from tests.messages import task_v2_pb2

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """Load tools/generate_messages.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("generate_messages", ROOT / "tools" / "generate_messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_modules_are_what_proto_says(generator: ModuleType) -> None:
    assert generator.differences(ROOT) == [], "run `make proto`"


def test_packages_ship_no_messages_that_only_tests_use(generator: ModuleType) -> None:
    shipped = [name for name in generator.PACKAGES if not name.startswith("tests/")]
    sources = [path for name in ("kybernate", "kybernate_shim") for path in (ROOT / name).rglob("*.py")]
    words = {path: set(re.findall(r"\w+_pb2\w*", path.read_text())) for path in sources}
    for module in (path for name in shipped for path in (ROOT / name).glob("*_pb2.py")):
        own = {module, module.with_name(f"{module.stem}_grpc.py")}
        assert any(module.stem in found for path, found in words.items() if path not in own), module


def test_all_modules_load_into_one_process(generator: ModuleType) -> None:
    """Names are global in protobuf: two files that define the same one cannot be loaded together."""
    paths = [path for package in generator.PACKAGES for path in (ROOT / package).glob("*_pb2*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    assert len([importlib.import_module(name) for name in names]) > 30


def test_check_names_stale_missing_and_left_over_modules(generator: ModuleType, tmp_path: Path) -> None:
    for folder in ("proto", *generator.PACKAGES):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    package = tmp_path / "kybernate_shim" / "messages"
    with (tmp_path / "proto" / "ttrpc" / "ttrpc.proto").open("a") as proto:
        proto.write("message Extra {}\n")
    (package / "shim_pb2.pyi").unlink()
    (package / "gone_pb2.py").touch()

    assert generator.differences(tmp_path) == [
        "kybernate_shim/messages/gone_pb2.py: no .proto file for it",
        "kybernate_shim/messages/shim_pb2.pyi: missing",
        "kybernate_shim/ttrpc/ttrpc_pb2.py: out of date",
        "kybernate_shim/ttrpc/ttrpc_pb2.pyi: out of date",
    ]
    generator.write(tmp_path)
    assert generator.differences(tmp_path) == []


def test_generator_tells_what_protoc_refuses(generator: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "proto" / "shim"
    source.mkdir(parents=True)
    (tmp_path / "proto" / "node").mkdir()
    (source / "broken.proto").write_text('syntax = "proto3"; message A { string a = 1; string b = 1; }')
    with pytest.raises(generator.GenerationFailed, match=r"broken\.proto"):
        generator.differences(tmp_path)


VECTORS: dict[str, tuple[Message, bytes]] = {
    "call": (
        ttrpc_pb2.Request(
            service="containerd.task.v2.Task",
            method="Connect",
            payload=task_pb2.ConnectRequest(id="t1").SerializeToString(),
            metadata=[ttrpc_pb2.KeyValue(key="containerd-namespace-ttrpc", value="default")],
        ),
        b"\x0a\x17containerd.task.v2.Task\x12\x07Connect\x1a\x04\x0a\x02t1"
        b"\x2a\x25\x0a\x1acontainerd-namespace-ttrpc\x12\x07default",
    ),
    "answer": (
        ttrpc_pb2.Response(payload=task_pb2.ConnectResponse(shim_pid=31389, task_pid=31418).SerializeToString()),
        bytes.fromhex("12 08 08 9d f5 01 10 ba f5 01"),
    ),
    "empty answer": (ttrpc_pb2.Response(), b""),
    "failure": (
        ttrpc_pb2.Response(status=ttrpc_pb2.Status(code=5, message="container not created: not found")),
        b"\x0a\x24\x08\x05\x12\x20container not created: not found",
    ),
    "delete": (
        task_pb2.DeleteResponse(pid=31418, exit_status=137, exited_at=Timestamp(seconds=1, nanos=2)),
        bytes.fromhex("08 ba f5 01 10 89 01 1a 04 08 01 10 02"),
    ),
    "paths of a checkpoint": (
        runc_options_pb2.CheckpointOptions(image_path="/tmp/snif/x21/img", work_path="/tmp/snif/x21/wk"),
        b"\x42\x11/tmp/snif/x21/img\x4a\x10/tmp/snif/x21/wk",
    ),
    "paths of a checkpoint, 1.7": (
        linux_runc_options_pb2.CheckpointOptions(work_path="/w", image_path="/i"),
        b"\x42\x02/w\x4a\x02/i",
    ),
    "configuration file": (
        Any(
            type_url="runtimeoptions.v1.Options",
            value=runtime_options_pb2.Options(config_path="/etc/kyb.toml").SerializeToString(),
        ),
        b"\x0a\x19runtimeoptions.v1.Options\x12\x0f\x12\x0d/etc/kyb.toml",
    ),
    "exit time of a live process": (
        task_pb2.StateResponse(exited_at=Timestamp(seconds=-62135596800)),
        bytes.fromhex("52 0b 08 80 92 b8 c3 98 fe ff ff ff 01"),
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_message_has_the_bytes_seen_on_the_wire(name: str) -> None:
    message, wire = VECTORS[name]
    assert message.SerializeToString() == wire
    assert type(message).FromString(wire) == message


def test_call_and_answer_have_the_lengths_seen_on_the_wire() -> None:
    assert [len(VECTORS[name][1]) for name in ("call", "answer", "failure")] == [79, 10, 38]


def test_unknown_fields_are_skipped() -> None:
    later = b"\x0a\x02t1" + b"\xfa\x3f\x03new"  # field 1023
    assert task_pb2.ConnectRequest.FromString(later).id == "t1"


def test_both_task_services_differ_by_name_only() -> None:
    old = task_v2_pb2.DESCRIPTOR.services_by_name["Task"]
    new = task_pb2.DESCRIPTOR.services_by_name["Task"]
    assert (old.full_name, new.full_name) == ("containerd.task.v2.Task", "containerd.task.v3.Task")
    assert [(m.name, m.input_type, m.output_type) for m in old.methods] == [
        (m.name, m.input_type, m.output_type) for m in new.methods
    ]


class Calls:
    """Stands in for a gRPC channel: notes which methods a stub would call, and how."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    def __getattr__(self, kind: str) -> Callable[..., None]:
        return lambda path, *_, **__: self.paths.update({path: kind})


def test_grpc_clients_call_containerd_and_cri_by_their_names() -> None:
    calls = Calls()
    for client in (
        tasks_pb2_grpc.TasksStub,
        content_pb2_grpc.ContentStub,
        cri_runtime_pb2_grpc.RuntimeServiceStub,
        cri_images_pb2_grpc.ImageServiceStub,
    ):
        client(cast(grpc.Channel, calls))
    expected = {
        "/containerd.services.tasks.v1.Tasks/Checkpoint": "unary_unary",
        "/containerd.services.content.v1.Content/Read": "unary_stream",
        "/containerd.services.content.v1.Content/Write": "stream_stream",
        "/runtime.v1.RuntimeService/CheckpointContainer": "unary_unary",
        "/runtime.v1.ImageService/PullImage": "unary_unary",
    }
    assert {path: calls.paths.get(path) for path in expected} == expected


def test_options_also_decode_as_bootstrap_parameters() -> None:
    """Both may arrive on the standard input of `start`; only the text in field 1 distinguishes them."""
    options = VECTORS["configuration file"][1]
    assert bootstrap_pb2.BootstrapParams.FromString(options).instance_id == "runtimeoptions.v1.Options"
