"""Which containers load the preload library, and what that puts into their config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.config import Config
from kybernate_shim.oci.preload_spec import (
    DESTINATION,
    LEDGER,
    LIBRARY,
    TURN,
    add_library,
    declared_vram,
    join,
    limit_vram,
    make_turn_file,
    show_turn,
    wants_library,
)
from kybernate_shim.oci.spec import Spec

ON, ALL = 'arena = "1GiB"', 'arena = "1GiB"\narena_containers = "all"'
GPU = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}


def config(gpu: str, top: str = "") -> Config:
    return Config().merged(f"{top}\n[gpu]\n{gpu}", by="node")


@pytest.mark.parametrize(
    ("gpu", "chosen", "document", "wanted"),
    [
        ("", "true", GPU, False),
        (ON, "", GPU, False),
        (ON, "true", {}, True),
        (ON, "yes", GPU, False),
        (ALL, "", GPU, True),
        (ALL, "", {}, False),
        (ALL, "false", GPU, False),
    ],
)
def test_library_is_for_those_who_can_use_it(gpu: str, chosen: str, document: dict[str, Any], wanted: bool) -> None:
    annotations = {"kybernate.io/arena": chosen} if chosen else {}
    assert wants_library(Spec({**document, "annotations": annotations}), config(gpu)) is wanted


def test_annotation_that_pods_may_not_use_does_not_count() -> None:
    spec = Spec({"annotations": {"kybernate.io/arena": "true"}})
    assert not wants_library(spec, config(ON, top="annotations = []"))


def test_library_is_mounted_and_comes_first() -> None:
    document: dict[str, Any] = {"process": {"env": ["A=1", "LD_PRELOAD=/a.so /b.so"]}}
    add_library(document)
    add_library(document)
    assert [mount["destination"] for mount in document["mounts"]] == [DESTINATION]
    assert document["mounts"][0]["source"] == str(LIBRARY)
    assert "ro" in document["mounts"][0]["options"]
    assert document["process"]["env"] == ["A=1", f"LD_PRELOAD={DESTINATION}:/a.so:/b.so"]


@pytest.mark.parametrize(("value", "found"), [("24Gi", 24 << 30), ("500M", 500_000_000), ("4096", 4096), ("24GB", 0)])
def test_declared_vram_is_a_quantity(value: str, found: int) -> None:
    assert declared_vram(Spec({"annotations": {"kybernate.io/vram": value}}), config("")) == found


def test_declared_vram_needs_the_library_but_no_arena() -> None:
    declared = {"kybernate.io/vram": "24Gi"}
    assert wants_library(Spec({"annotations": declared}), config(""))
    assert not wants_library(Spec({"annotations": {**declared, "kybernate.io/arena": "false"}}), config(ON))


def test_limit_is_in_the_environment_and_its_count_on_a_tmpfs() -> None:
    document: dict[str, Any] = {"process": {"env": ["KYBERNATE_VRAM=0", "A=1"]}}
    limit_vram(document, 0)
    assert "A=1" in document["process"]["env"]
    limit_vram(document, 5 << 20)
    (mount,) = document["mounts"]
    assert (mount["destination"], mount["type"]) == (LEDGER, "tmpfs")
    assert document["process"]["env"] == ["A=1", f"KYBERNATE_VRAM={5 << 20}:{LEDGER}/ledger"]


def test_turn_is_a_file_that_the_container_can_only_read(tmp_path: Path) -> None:
    file = make_turn_file(tmp_path / "sources/turns/n/c")
    document: dict[str, Any] = {}
    show_turn(document, file)
    show_turn(document, file)
    (mount,) = document["mounts"]
    assert (mount["destination"], mount["source"], "ro" in mount["options"]) == (TURN, str(file), True)
    assert document["process"]["env"] == [f"KYBERNATE_TURN={TURN}"]
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"", 0o644)
    assert {one.stat().st_mode & 0o777 for one in file.parents[:3]} == {0o711}


def test_turn_file_of_a_container_that_starts_again_lets_it_begin(tmp_path: Path) -> None:
    file = make_turn_file(tmp_path / "sources/turns/n/c")
    file.write_text("start")
    assert make_turn_file(file).read_bytes() == b""


def test_exec_loads_the_library_as_the_container_does() -> None:
    document: dict[str, Any] = {"process": {"env": ["OWN=1"]}}
    add_library(document)
    limit_vram(document, 5)
    show_turn(document, Path("/turn"))
    process: dict[str, Any] = {"env": ["A=1", "LD_PRELOAD=/a.so", "KYBERNATE_VRAM=0"]}
    join(process, Spec(document))
    join(process, Spec(document))
    assert process["env"] == [
        "A=1",
        f"LD_PRELOAD={DESTINATION}:/a.so",
        f"KYBERNATE_VRAM=5:{LEDGER}/ledger",
        f"KYBERNATE_TURN={TURN}",
    ]
