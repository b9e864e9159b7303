"""Which containers load the preload library, and what that puts into their config.json."""

from __future__ import annotations

from typing import Any

import pytest

from kybernate_shim.config import Config
from kybernate_shim.oci.preload_spec import DESTINATION, LIBRARY, add_library, wants_library
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
