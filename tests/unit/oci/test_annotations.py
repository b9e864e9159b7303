"""Every annotation is known by its key and its values; what looks like a wish to be restored starts nothing."""

from __future__ import annotations

import ast
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.errors import Refused
from kybernate_shim.oci.annotations import DOMAIN, KNOWN, RESTORE_FROM, mistake, nearest, require_unmistaken
from tests.documentation import ROOT, modules

# Labels, of containerd's records and of images: no annotations.
LABELS = {
    "kybernate.io/restored-from", "kybernate.io/parked", "kybernate.io/parked-namespace", "kybernate.io/parked-log",
    "kybernate.io/reason", "kybernate.io/lab", "kybernate.io/up", "kybernate.io/up-model", "kybernate.io/up-digest",
    "kybernate.io/up-network", "kybernate.io/at-work",
}  # fmt: skip
TABLE = (ROOT / "docs/checkpoint.md").read_text()


def test_every_key_of_the_code_is_known() -> None:
    texts = {
        node.value
        for path, tree in modules().items()
        if "tests" not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    keys = {text for text in texts if re.fullmatch(r"kybernate\.io/[a-z-]+", text)}
    assert keys - LABELS == set(KNOWN)


def test_every_key_is_documented() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert [key for key in KNOWN if f"`{key}" not in pages] == []


@pytest.mark.parametrize(
    "key",
    [
        "kybernate.io/restore-form", "kybernate.io/restore_from", "kybernate.io/restorefrom", "kybernate.io/restore",
        "kybernate.io/Restore-From", "kybernate.io/restore-from-main", "kybernate.io/restore-image",
        "kybernate/restore-from", "kybernate.com/restore-from", "kybernate.io/restor-from.main",
    ],
)  # fmt: skip
def test_what_looks_like_a_restore_is_refused(key: str) -> None:
    with pytest.raises(Refused, match=f"did you mean {re.escape(RESTORE_FROM)}") as refused:
        require_unmistaken({key: "nightly", "kybernate.io/tcp": "close"})
    assert "correct the annotation, or remove it" in str(refused.value)


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {RESTORE_FROM: "nightly"},
        {RESTORE_FROM: ""},  # as a template leaves it that has nothing to restore
        {f"{RESTORE_FROM}.main": "nightly"},
        {"kybernate.io/arena": "yes"},  # without effect: the agent warns, and the program runs as it would
        {"kybernate.io/workload": "web", "example.org/restore-form": "x", "io.kubernetes.cri.sandbox-name": "restore"},
    ],
)
def test_nothing_else_keeps_a_container_from_starting(annotations: dict[str, str]) -> None:
    require_unmistaken(annotations)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("kybernate.io/chekpoint", "kybernate.io/checkpoint"),
        ("kybernate.io/Checkpoint.main", "kybernate.io/checkpoint.main"),
        ("kybernate.io/restore-form.main", "kybernate.io/restore-from.main"),
        ("kybernate.io/gpumap", "kybernate.io/gpu-map"),
        ("kybernate.io/volume", "kybernate.io/volumes"),
        ("kybernate.io/areana.main", "kybernate.io/arena"),
        ("kybernate.io/nothing-like-it", ""),
    ],
)
def test_nearest_key_is_named(key: str, meant: str) -> None:
    assert nearest(key) == meant


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("kybernate.io/tcp", "established", "establish"),
        ("kybernate.io/arena", "true", "True"),
        ("kybernate.io/force", "false", "no"),
        ("kybernate.io/nccl-safe", "true", "1"),
        ("kybernate.io/pause", "suspend", "true"),
        ("kybernate.io/gpu-map", "GPU-a=GPU-b,GPU-c=GPU-d", "0=1"),
        ("kybernate.io/checkpoint", "nightly-1.2", "a/b"),
        ("kybernate.io/on-restart", "latest", "newest"),
        ("kybernate.io/max-freeze", "500ms", "0.0s"),
        ("kybernate.io/vram", "24Gi", "24 GiB"),
        ("kybernate.io/vram", "500M", "0Gi"),
        ("kybernate.io/wake-on-use", "false", "no"),
        ("kybernate.io/seat", "gpu-1x-seat", "Gpu_1"),
        ("kybernate.io/priority", "-5", "high"),
        ("kybernate.io/kind", "inference", "-"),
    ],
)
def test_values_are_known(key: str, right: str, wrong: str) -> None:
    assert mistake(key, right) is None
    found = mistake(key, wrong)
    assert found is not None
    assert wrong in str(found)
    assert not found.loses_state


def test_every_annotation_with_values_of_its_own_is_in_the_table_above() -> None:
    strict = {key for key, kind in KNOWN.items() if not kind.accepts("\0 nonsense")}
    assert strict == {
        "kybernate.io/tcp", "kybernate.io/arena", "kybernate.io/force", "kybernate.io/nccl-safe",
        "kybernate.io/pause", "kybernate.io/gpu-map", "kybernate.io/checkpoint", "kybernate.io/on-restart",
        "kybernate.io/max-freeze", "kybernate.io/vram", "kybernate.io/wake-on-use", "kybernate.io/seat",
        "kybernate.io/priority", "kybernate.io/kind",
    }  # fmt: skip


def test_container_of_an_annotation_is_one_of_the_pod() -> None:
    assert mistake(f"{RESTORE_FROM}.side", "x", ["main", "side"]) is None
    found = mistake(f"{RESTORE_FROM}.mian", "x", ["main", "side"])
    assert str(found).endswith(f"the pod has no container 'mian'; did you mean {RESTORE_FROM}.main?")


@given(st.text(max_size=300), st.text(max_size=300))
def test_no_text_is_an_error_and_messages_are_bounded(name: str, value: str) -> None:
    for key in (name, DOMAIN + name, RESTORE_FROM + "." + name):
        found = mistake(key, value, ["main"])
        assert found is None or len(str(found)) < 2500
        assert "\n" not in str(found)
