"""Options of every type that containerd's clients send."""

from __future__ import annotations

import typing
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.config import Config, ConfigInvalid
from kybernate_shim.errors import Invalid
from kybernate_shim.messages import bootstrap_pb2 as bootstrap
from kybernate_shim.messages import linux_runc_options_pb2 as linux_runc
from kybernate_shim.messages import runc_options_pb2 as runc
from kybernate_shim.messages import runtime_options_pb2 as generic
from kybernate_shim.messages.any import pack
from kybernate_shim.oci.options import (
    CheckpointOptions,
    RuntimeOptions,
    decode_checkpoint_options,
    decode_options,
    decode_start_input,
    effective_config,
)

COMMON: dict[str, typing.Any] = {
    "no_pivot_root": True,
    "no_new_keyring": True,
    "shim_cgroup": "/s",
    "io_uid": 7,
    "io_gid": 8,
}
CRIU: dict[str, typing.Any] = {"criu_image_path": "/i", "criu_work_path": "/w"}
RUNTIME: dict[str, typing.Any] = {"binary_name": "crun", "root": "/r", "systemd_cgroup": True}
CHECKPOINT: dict[str, typing.Any] = {
    "exit": True,
    "open_tcp": True,
    "external_unix_sockets": True,
    "terminal": True,
    "file_locks": True,
    "cgroups_mode": "soft",
    "image_path": "/images",
    "work_path": "/work",
}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (runc.Options(**COMMON, **CRIU, **RUNTIME), RuntimeOptions(**COMMON, **CRIU, **RUNTIME)),
        (linux_runc.CreateOptions(**COMMON, **CRIU), RuntimeOptions(**COMMON, **CRIU)),
        (
            linux_runc.RuncOptions(runtime="crun", runtime_root="/r", systemd_cgroup=True),
            RuntimeOptions(**RUNTIME),
        ),
        (generic.Options(config_path="/etc/kyb.toml"), RuntimeOptions(config_path="/etc/kyb.toml")),
        (runc.CheckpointOptions(image_path="/i"), RuntimeOptions()),
        (linux_runc.CheckpointOptions(exit=True), RuntimeOptions()),
    ],
    ids=lambda value: value.DESCRIPTOR.full_name if isinstance(value, Message) else "",
)
@pytest.mark.parametrize("prefix", ["", "/", "type.googleapis.com/"])
def test_options_of_every_type_decode_under_any_prefix(message: Message, expected: RuntimeOptions, prefix: str) -> None:
    packed = pack(message)
    packed.type_url = prefix + packed.type_url
    assert decode_options(packed) == expected


@pytest.mark.parametrize("absent", [None, Any()])
def test_absent_options_are_the_defaults(absent: Any | None) -> None:
    assert decode_options(absent) == RuntimeOptions()
    assert decode_checkpoint_options(absent) == CheckpointOptions()


def test_options_table_as_toml_sets_what_the_typed_options_would() -> None:
    body = b'BinaryName = "/usr/bin/crun"\nSystemdCgroup = true\nIoUid = 5\nTypeUrl = "x"\nruntime_root = "/r"\n'
    decoded = decode_options(pack(generic.Options(config_body=body)))
    assert (decoded.binary_name, decoded.systemd_cgroup, decoded.io_uid) == ("/usr/bin/crun", True, 5)
    config = effective_config(Config(), decoded)
    assert config.runtime_root == Path("/r")
    assert config.warnings == ()


def test_config_path_gives_way_to_config_body(tmp_path: Path) -> None:
    file = tmp_path / "kyb.toml"
    file.write_text('runtime = "crun"\n[deadlines]\nkill = 1\n')
    options = RuntimeOptions(config_path=str(file), config_body='runtime = "runc"')
    config = effective_config(Config(), options)
    assert (config.runtime, config.deadlines.kill) == ("runc", 1)


def test_config_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=f"{tmp_path}/none: named by the runtime options, but cannot be read"):
        effective_config(Config(), RuntimeOptions(config_path=f"{tmp_path}/none"))


@pytest.mark.parametrize("body", [b"BinaryName = 5", b"SystemdCgroup = 'true'", b"IoUid = true", b"not toml", b"\xff"])
def test_config_body_that_makes_no_sense_is_refused(body: bytes) -> None:
    with pytest.raises(Invalid, match="options"):
        decode_options(pack(generic.Options(config_body=body)))


@pytest.mark.parametrize("kind", [runc.CheckpointOptions, linux_runc.CheckpointOptions])
def test_checkpoint_options_of_both_packages_mean_the_same(
    kind: type[runc.CheckpointOptions | linux_runc.CheckpointOptions],
) -> None:
    decoded = decode_checkpoint_options(pack(kind(**CHECKPOINT, empty_namespaces=["network"])))
    assert decoded == CheckpointOptions(**CHECKPOINT, empty_namespaces=("network",))


def test_checkpoint_paths_have_swapped_numbers_on_the_wire() -> None:
    paths = b"\x42\x02/a\x4a\x02/b"  # field 8 = /a, field 9 = /b
    new = decode_checkpoint_options(Any(type_url="containerd.runc.v1.CheckpointOptions", value=paths))
    old = decode_checkpoint_options(Any(type_url="containerd.linux.runc.CheckpointOptions", value=paths))
    assert (new.image_path, new.work_path) == ("/a", "/b")
    assert (old.image_path, old.work_path) == ("/b", "/a")


def test_options_of_a_container_say_nothing_about_a_checkpoint() -> None:
    assert decode_checkpoint_options(pack(runc.Options(root="/r"))) == CheckpointOptions()


@pytest.mark.parametrize("decode", [decode_options, decode_checkpoint_options])
def test_unknown_type_is_refused_with_those_understood(decode: object) -> None:
    assert callable(decode)
    with pytest.raises(Invalid, match="options") as caught:
        decode(Any(type_url="type.googleapis.com/acme.Options"))
    for name in ("type.googleapis.com/acme.Options", "containerd.runc.v1.Options", "runtimeoptions.v1.Options"):
        assert name in str(caught.value)


def test_bytes_that_are_not_the_claimed_type_are_refused() -> None:
    with pytest.raises(Invalid, match=r"containerd\.runc\.v1\.Options cannot be decoded"):
        decode_options(Any(type_url="containerd.runc.v1.Options", value=b"\xff\xff"))


def test_start_input_of_2_2_is_an_any() -> None:
    wire = bytes.fromhex("0a19") + b"runtimeoptions.v1.Options" + bytes.fromhex("120f120d") + b"/etc/kyb.toml"
    assert decode_options(decode_start_input(wire)).config_path == "/etc/kyb.toml"


def test_start_input_of_2_3_carries_the_options_among_its_extensions() -> None:
    params = bootstrap.BootstrapParams(instance_id="c", namespace="k8s.io", containerd_grpc_address="/run/c.sock")
    params.extensions.add(value=Any(type_url="acme.Extension", value=b"x"))
    params.extensions.add(value=pack(runc.Options(shim_cgroup="/s")))
    assert decode_options(decode_start_input(params.SerializeToString())).shim_cgroup == "/s"


def test_start_input_without_options_gives_none() -> None:
    params = bootstrap.BootstrapParams(instance_id="c", namespace="default", containerd_version="v2.3.0")
    assert decode_start_input(b"") is None
    assert decode_start_input(params.SerializeToString()) is None


def test_start_input_of_an_unknown_type_is_refused_later() -> None:
    packed = Any(type_url="acme.Options", value=b"text")
    assert decode_start_input(packed.SerializeToString()) == packed


@given(st.binary())
def test_any_start_input_is_read_or_refused(data: bytes) -> None:
    with suppress(Invalid):
        assert isinstance(decode_options(decode_start_input(data)), RuntimeOptions)
