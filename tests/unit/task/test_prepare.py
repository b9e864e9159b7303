"""Which checkpoint image a new container starts from, and whose word its content is taken on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import structlog

from kybernate_shim.checkpoint.image.store import Image, write_manifest
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused
from kybernate_shim.linux.children import Children
from kybernate_shim.messages import runc_options_pb2 as runc
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.messages.any import pack
from kybernate_shim.task.prepare import prepare
from tests.unit.checkpoint.image.manifests import MINIMAL


@pytest.fixture
def image(tmp_path: Path) -> Path:
    directory = tmp_path / "image"
    directory.mkdir()
    write_manifest(directory, MINIMAL, durable=False)
    return directory


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle, and a runtime to be found in PATH."""
    runtime = tmp_path / "bin/runc"
    runtime.parent.mkdir()
    runtime.write_text("#!/bin/sh\n")
    runtime.chmod(0o755)
    monkeypatch.setenv("PATH", str(runtime.parent))
    directory = tmp_path / "bundle"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"ociVersion": "1.1.0", "annotations": {}}))
    return directory


def prepared(bundle: Path, *, checkpoint: str = "", criu_image_path: str = "", gpu: str = "") -> Image | None:
    request = wire.CreateTaskRequest(id="c", bundle=str(bundle), checkpoint=checkpoint)
    if criu_image_path:
        request.options.CopyFrom(pack(runc.Options(criu_image_path=criu_image_path)))
    log = structlog.get_logger()
    ready = prepare(
        request,
        namespace="n",
        config=Config(audit_log=None).merged(f"[gpu]\n{gpu}", by="node"),
        children=Children(),
        publish=lambda *_: None,
        log=log,
    )
    return asyncio.run(ready).image


def test_a_plain_container_has_no_image(bundle: Path) -> None:
    assert prepared(bundle) is None


def test_an_image_that_containerd_has_unpacked_counts_as_checked(bundle: Path, image: Path) -> None:
    assert prepared(bundle, checkpoint=str(image)) == Image(image, MINIMAL, checked=True)


def test_a_directory_is_to_be_checked_also_where_containerd_repeats_its_path(bundle: Path, image: Path) -> None:
    wanted = Image(image, MINIMAL, checked=False)
    assert prepared(bundle, criu_image_path=str(image)) == wanted
    assert prepared(bundle, checkpoint=str(image), criu_image_path=str(image)) == wanted


def test_a_directory_that_an_annotation_names_is_to_be_checked(bundle: Path, image: Path) -> None:
    document = {"ociVersion": "1.1.0", "annotations": {"kybernate.io/restore-from": str(image)}}
    (bundle / "config.json").write_text(json.dumps(document))
    assert prepared(bundle) == Image(image, MINIMAL, checked=False)


@pytest.mark.parametrize(("of_image", "loads"), [(False, True), (True, False)])
def test_library_is_not_mounted_for_processes_that_have_none(
    bundle: Path, image: Path, monkeypatch: pytest.MonkeyPatch, of_image: bool, loads: bool
) -> None:
    """As those of an image from before the node had an arena: a mount that it lacks would keep it from a restore."""
    monkeypatch.setattr("kybernate_shim.task.prepare.LIBRARY", bundle / "config.json")
    annotated(bundle, {"kybernate.io/arena": "true"})
    prepared(bundle, criu_image_path=str(image) if of_image else "", gpu='arena = "1GiB"')
    mounts = json.loads((bundle / "config.json").read_text()).get("mounts", [])
    assert [one["destination"] for one in mounts] == ["/dev/kybernate-arena.so"] * loads


@pytest.mark.parametrize(
    ("annotations", "shown"),
    [
        ({"kybernate.io/vram": "1Gi", "kybernate.io/seat": "one"}, True),
        ({"kybernate.io/vram": "1Gi", "kyb.ai/seat": "g0-s1"}, True),
        ({"kybernate.io/vram": "1Gi"}, False),
        ({"kybernate.io/seat": "one"}, False),
    ],
)
def test_turn_is_shown_to_containers_with_a_seat_and_the_library(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, annotations: dict[str, str], shown: bool
) -> None:
    file = tmp_path / "sources/turns/n/c"
    monkeypatch.setattr("kybernate_shim.task.prepare.LIBRARY", bundle / "config.json")
    monkeypatch.setattr("kybernate_shim.task.prepare.turn_file", lambda namespace, container: file)
    annotated(bundle, annotations)
    prepared(bundle)
    mounts = json.loads((bundle / "config.json").read_text()).get("mounts", [])
    assert file.exists() is shown
    assert ("/dev/kybernate-turn" in [one["destination"] for one in mounts]) is shown


MISSPELT = {"kybernate.io/restore-form": "nightly"}


def annotated(bundle: Path, annotations: dict[str, str]) -> None:
    (bundle / "config.json").write_text(json.dumps({"ociVersion": "1.1.0", "annotations": annotations}))


def test_misspelt_wish_to_be_restored_is_refused(bundle: Path) -> None:
    annotated(bundle, MISSPELT)
    with pytest.raises(Refused, match=r"did you mean kybernate\.io/restore-from\?"):
        prepared(bundle)


def test_sandbox_of_such_a_pod_is_there_to_say_why(bundle: Path) -> None:
    annotated(bundle, {**MISSPELT, "io.kubernetes.cri.container-type": "sandbox"})
    assert prepared(bundle) is None
