"""What the shim reads in config.json, and how it changes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.errors import Invalid
from kybernate_shim.oci.spec import Spec, edit_spec


def spec_with(**document: Any) -> Spec:
    return Spec(document)


def write(bundle: Path, document: object) -> Path:
    file = bundle / "config.json"
    file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize(
    ("path", "systemd"),
    [
        ("", False),
        ("/default/c", False),
        ("/kubepods/besteffort/pod1/c", False),
        ("system.slice:cri-containerd:c", True),
        (":cri-containerd:c", True),
        ("/odd:name:c", False),
        ("a:b", False),
        ("a:b:c:d", False),
    ],
)
def test_cgroups_path_shows_who_makes_the_cgroup(path: str, systemd: bool) -> None:
    assert spec_with(linux={"cgroupsPath": path}).systemd_style is systemd


@pytest.mark.parametrize(
    ("namespaces", "own"),
    [
        (None, False),
        ([{"type": "mount"}], False),
        ([{"type": "pid"}], True),
        ([{"type": "pid", "path": "/proc/1/ns/pid"}], False),
    ],
)
def test_own_pid_namespace_is_one_without_a_path(namespaces: Any, own: bool) -> None:
    assert spec_with(linux={"namespaces": namespaces}).own_pid_namespace is own


def test_last_value_of_a_variable_counts() -> None:
    spec = spec_with(process={"env": ["A=1", "AB=9", "A=2=3", "C"], "terminal": True})
    assert (spec.env("A"), spec.env("C"), spec.env("D")) == ("2=3", None, None)
    assert spec.terminal


def test_empty_document_has_an_answer_to_everything() -> None:
    spec = Spec({})
    assert (spec.cgroups_path, spec.terminal) == ("", False)
    assert (spec.mounts, spec.devices, spec.requests_gpu()) == ((), (), None)
    assert spec.namespace_path("network") is None


def visible(value: str) -> dict[str, Any]:
    return {"process": {"env": [f"NVIDIA_VISIBLE_DEVICES={value}"]}}


def hook(stage: str, path: str) -> dict[str, Any]:
    return {"hooks": {stage: [{"path": path, "args": ["x"]}]}}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (visible("all"), "environment NVIDIA_VISIBLE_DEVICES=all"),
        (visible("0,1"), "environment NVIDIA_VISIBLE_DEVICES=0,1"),
        (
            {"annotations": {"cdi.k8s.io/dp_gpu": "vendor.com/x=0, nvidia.com/gpu=0"}},
            "annotation cdi.k8s.io/dp_gpu=vendor.com/x=0, nvidia.com/gpu=0",
        ),
        (
            {"annotations": {"cdi.k8s.io/m": "management.nvidia.com/gpu=all"}},
            "annotation cdi.k8s.io/m=management.nvidia.com/gpu=all",
        ),
        ({"linux": {"devices": [{"path": "/dev/nvidia0", "type": "c"}]}}, "device /dev/nvidia0"),
        ({"linux": {"devices": [{"path": "/dev/dxg"}]}}, "device /dev/dxg"),
        (
            {"mounts": [{"destination": "/var/run/nvidia-container-devices/GPU-1"}]},
            "mount /var/run/nvidia-container-devices/GPU-1",
        ),
        (
            hook("prestart", "/usr/bin/nvidia-container-runtime-hook"),
            "prestart hook /usr/bin/nvidia-container-runtime-hook",
        ),
        (hook("createRuntime", "/usr/bin/nvidia-ctk"), "createRuntime hook /usr/bin/nvidia-ctk"),
        (hook("createContainer", "/usr/bin/nvidia-cdi-hook"), "createContainer hook /usr/bin/nvidia-cdi-hook"),
    ],
)
def test_gpu_request_is_recognised_and_named(document: dict[str, Any], reason: str) -> None:
    assert Spec(document).requests_gpu() == reason


@pytest.mark.parametrize(
    "document",
    [
        visible(""),
        visible("void"),
        visible("none"),
        {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"]}},
        {"process": {"env": ["NVIDIA_DRIVER_CAPABILITIES=all"]}},
        {"annotations": {"cdi.k8s.io/nic": "intel.com/nic=0", "note": "nvidia.com/gpu=0"}},
        {"annotations": {"cdi.k8s.io/x": "notnvidia.com/gpu=0"}},
        {"linux": {"devices": [{"path": "/dev/fuse"}, {}]}},
        hook("poststop", "/usr/bin/nvidia-ctk"),
        hook("prestart", "/usr/bin/oci-hook"),
    ],
)
def test_what_asks_for_no_gpu_is_left_alone(document: dict[str, Any]) -> None:
    assert Spec(document).requests_gpu() is None


def test_read_gives_the_whole_document(tmp_path: Path) -> None:
    document = {"hostname": "h", "root": {"path": "rootfs"}, "x-future": [1]}
    write(tmp_path, document)
    assert Spec.read(tmp_path).document == document


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_missing_or_broken_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(Invalid, match=r"config\.json"):
        Spec.read(tmp_path)


def test_edit_keeps_what_it_does_not_know_and_the_mode(tmp_path: Path) -> None:
    file = write(tmp_path, {"hostname": "old", "x-future": {"a": [1, None, "ü"]}, "big": 2**63})
    file.chmod(0o640)
    edited = edit_spec(tmp_path, lambda document: document.update(hostname="new"))
    assert edited.document["hostname"] == "new"
    assert json.loads(file.read_text()) == {"hostname": "new", "x-future": {"a": [1, None, "ü"]}, "big": 2**63}
    assert file.stat().st_mode & 0o7777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("value", [object(), b"bytes"])
def test_edit_that_fails_leaves_the_file_as_it_was(tmp_path: Path, value: object) -> None:
    file = write(tmp_path, {"hostname": "old"})
    with pytest.raises(TypeError):
        edit_spec(tmp_path, lambda document: document.update(hostname=value))
    assert json.loads(file.read_text()) == {"hostname": "old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]
