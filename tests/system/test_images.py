"""Images by name, from their checkpoint to a restore; and images from elsewhere, which an import makes one's own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.image.manifest import Signature
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.checkpoint.image.store import read_image, write_manifest
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.trust.keys import Key
from tests.system.checkpoints import Witness, counting, kybernate, refused
from tests.system.cri import Cri
from tests.system.ctr import Ctr, run
from tests.system.tenants import ROOT

COUNTER = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"]
FROM = "kybernate.io/restore-from"


@pytest.fixture
def cri() -> Iterator[Cri]:
    with Cri() as client:
        yield client


@pytest.fixture
def name() -> Iterator[str]:
    """A name for images, which are removed again."""
    name = f"images-{os.getpid()}"
    yield name
    for place in (ROOT / name, ROOT / "default" / name):
        shutil.rmtree(place, ignore_errors=True)


def listed(path: Path) -> dict[str, Any]:
    """Return what `kybernate images` says of one image."""
    (found,) = (one for one in json.loads(kybernate("images", "--all", "--json")) if one["path"] == str(path))
    return dict(found)


def test_pods_image_is_made_listed_and_restored_by_its_name(cri: Cri, name: str) -> None:
    with cri.pod() as pod:
        cri.run(pod, "counter", COUNTER)
        cri.await_log(pod, "counter", "5")
        kybernate("checkpoint", f"default/{pod.config.metadata.name}", name, "--exit")
        last = int(cri.log(pod, "counter")[-1])
        image = listed(ROOT / "default" / name)
    assert (image["name"], image["namespace"], image["source"]["pod"]) == (name, "default", pod.config.metadata.name)
    assert (image["usable"], image["states"]) == (True, [])
    assert json.loads(kybernate("inspect", name, "--json"))["signature"]["valid"] is True
    with cri.pod(annotations={FROM: name}) as pod:
        cri.run(pod, "counter", ["/never/run"])
        assert int(cri.await_log(pod, "counter", str(last + 5))[0]) == last + 1


def test_pods_image_in_no_namespaces_directory_is_imported_and_restored_by_a_pod(cri: Cri, name: str) -> None:
    with cri.pod() as pod:
        cri.run(pod, "counter", COUNTER)
        cri.await_log(pod, "counter", "5")
        kybernate("checkpoint", f"default/{pod.config.metadata.name}", str(ROOT / name), "--exit")
        last = int(cri.log(pod, "counter")[-1])
    unsign(ROOT / name)
    assert listed(ROOT / name)["states"] == ["unsigned", "wrong namespace"]
    kybernate("import", name, "--yes")
    assert listed(ROOT / "default" / name)["states"] == []
    with cri.pod(annotations={FROM: name}) as pod:
        cri.run(pod, "counter", ["/never/run"])
        assert int(cri.await_log(pod, "counter", str(last + 5))[0]) == last + 1


def unsign(image: Path) -> str:
    write_manifest(image, replace(read_image(image).manifest, signature=Signature()), durable=False)
    return "the image is not signed"


def alter(image: Path) -> str:
    manifest = read_image(image).manifest
    write_manifest(image, replace(manifest, time="2020-01-01T00:00:00Z"), durable=False)
    return "the manifest was changed after it was signed"


def sign_elsewhere(image: Path) -> str:
    write_manifest(image, sign(read_image(image).manifest, Key(b"k" * 32, Path("/k"))), durable=False)
    return "which is not valid here"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """An image of a container that counts, and how far it had counted."""
    place = tmp_path_factory.mktemp("saved")
    with counting(Ctr(), log=place / "log") as counter:
        kybernate("checkpoint", counter.id, str(place / "image"), "--exit")
        last = counter.count()
    yield place / "image", last
    shutil.rmtree(place)


@pytest.fixture
def foreign(saved: tuple[Path, int], tmp_path: Path) -> Iterator[Path]:
    """A copy of the image that lies elsewhere."""
    image = tmp_path / "elsewhere"
    shutil.copytree(saved[0], image)
    yield image
    shutil.rmtree(image)


@pytest.mark.parametrize("make_foreign", [unsign, alter, sign_elsewhere])
def test_foreign_image_is_refused_with_the_remedy(foreign: Path, make_foreign: Callable[[Path], str]) -> None:
    reason = make_foreign(foreign)
    said = refused("kybernate", "restore", str(foreign), "--detach")
    assert reason in said
    assert f"`kybernate import {foreign}`" in said


def test_foreign_image_is_restored_after_its_import(
    ours: Ctr, saved: tuple[Path, int], foreign: Path, name: str
) -> None:
    sign_elsewhere(foreign)
    assert "stdin is not a terminal" in refused("kybernate", "import", str(foreign), name)
    kybernate("import", str(foreign), name, "--yes")
    assert not verify(ROOT / name)
    assert listed(ROOT / name)["states"] == []
    restored = Witness(ours.new_id("r"), foreign.parent / "log")
    kybernate("restore", name, "--name", restored.id, "--log", str(restored.log), "--detach")
    try:
        restored.assert_goes_on()
        assert restored.numbers()[0] == saved[1] + 1
    finally:
        ours.remove(restored.id)
        run(["ctr", "snapshot", "rm", restored.id], status=None)


def test_image_whose_bytes_were_changed_is_not_imported(foreign: Path, name: str) -> None:
    with (foreign / "pages-1.img").open("r+b") as pages:
        pages.write(b"\xff" * 8)
    assert "pages-1.img: digest" in refused("kybernate", "import", str(foreign), name, "--yes")
    assert not (ROOT / name).exists()
