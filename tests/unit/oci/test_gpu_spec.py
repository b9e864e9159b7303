"""A restored bundle has its GPUs as a started one would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kybernate_shim.oci.gpu_spec import add_devices, drop_gpu_hooks, set_environment

NODES = {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"}


def devices_of(tmp_path: Path) -> Path:
    """Character devices under NVIDIA's names, which only root could make: links to one that everybody has."""
    for name in NODES:
        (tmp_path / name).symlink_to("/dev/null")
    (tmp_path / "nvidia-caps").mkdir()
    return tmp_path


def paths(document: dict[str, Any]) -> list[str]:
    return [device["path"] for device in (document.get("linux") or {}).get("devices") or ()]


def asking(value: str) -> dict[str, Any]:
    return {"process": {"env": [f"NVIDIA_VISIBLE_DEVICES={value}"]}}


def test_devices_that_a_hook_would_make_are_added_with_their_rules(tmp_path: Path) -> None:
    document = asking("1")
    add_devices(document, devices_of(tmp_path))
    assert paths(document) == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"]
    rules = document["linux"]["resources"]["devices"]
    assert rules[0] == {"allow": True, "access": "rwm", "type": "c", "major": 1, "minor": 3}
    assert len(rules) == 3


def test_gpus_by_uuid_are_all_allowed(tmp_path: Path) -> None:
    document = asking("GPU-1")
    add_devices(document, devices_of(tmp_path))
    assert {"/dev/nvidia0", "/dev/nvidia1"} <= set(paths(document))


def test_containers_without_wish_or_with_devices_stay_as_they_are(tmp_path: Path) -> None:
    devices = devices_of(tmp_path)
    for document in ({}, asking("void"), asking("none")):
        before = repr(document)
        add_devices(document, devices)
        assert repr(document) == before
    document = {**asking("0"), "linux": {"devices": [{"path": "/dev/nvidia0"}]}}
    add_devices(document, devices)
    assert paths(document) == ["/dev/nvidia0"]


def test_only_the_vendors_early_hooks_go() -> None:
    ours, theirs = {"path": "/opt/own"}, {"path": "/usr/bin/nvidia-container-runtime-hook"}
    document = {"hooks": {"prestart": [theirs, ours], "createRuntime": [theirs], "poststop": [theirs]}}
    drop_gpu_hooks(document)
    assert document["hooks"] == {"prestart": [ours], "createRuntime": [], "poststop": [theirs]}


def test_environment_replaces_what_was_set() -> None:
    document = {"process": {"env": ["A=1", "B=2", "A=3"]}}
    set_environment(document, {"A": "9"})
    assert document["process"]["env"] == ["B=2", "A=9"]
