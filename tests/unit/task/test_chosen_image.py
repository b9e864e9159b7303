"""Which image a pod's container starts from, with images and earlier runs on a disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from kybernate_shim.checkpoint.image.manifest import Lineage, Manifest, Source
from kybernate_shim.checkpoint.image.namespace import images_of
from kybernate_shim.checkpoint.image.requested import RESTORE_FROM, wanted_image
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.checkpoint.image.starts import ON_RESTART, KnownImage, Run
from kybernate_shim.checkpoint.image.store import CheckpointNotFound, write_manifest
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.spec import Spec
from kybernate_shim.task import chosen_image
from kybernate_shim.task.fetch import ImageNotFetched
from kybernate_shim.task.runs import PodRuns
from kybernate_shim.trust.keys import signing_key
from kybernate_shim.trust.requester import (
    CONTAINER_NAME,
    CONTAINER_TYPE,
    POD_NAME,
    POD_NAMESPACE,
    POD_UID,
    SANDBOX_ID,
    Requester,
)
from tests.unit.checkpoint.image.manifests import MINIMAL


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tmp_path.chmod(0o700)
    return Config(
        key_directory=tmp_path / "keys", checkpoint_root=tmp_path / "root", work_root=tmp_path / "work", audit_log=None
    )


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that an agent was asked for, which has none of them."""
    asked: list[str] = []

    async def fetch(wanted: Any, *_: Any) -> bool:
        asked.append(wanted.name)
        return False

    monkeypatch.setattr(chosen_image, "fetch", fetch)
    return asked


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[KnownImage]:
    """Images that an agent knows on other nodes or in the object store; of those it brings none."""
    known: list[KnownImage] = []

    async def related(requester: Requester, name: str, words: Sequence[str]) -> tuple[KnownImage, ...]:
        origins = {image.origin for image in known if image.name == name} | set(words)
        return tuple(image for image in known if origins & {image.pod, image.pod_uid, image.origin})

    monkeypatch.setattr(chosen_image, "related", related)
    return known


def made(config: Config, name: str, minute: int = 0, *, uid: str = "uid-0", container: str = "c0", parent: str = "",
         pod: str = "web-0", of: str = "main") -> Manifest:  # fmt: skip
    directory = config.checkpoint_root / "team-a" / name
    directory.mkdir(parents=True, mode=0o700)
    for parent_ in (config.checkpoint_root, directory.parent):
        parent_.chmod(0o700)
    manifest = replace(
        MINIMAL,
        id=f"id of {name}",
        time=f"2026-01-02T03:{minute:02}:00Z",
        source=Source(container, "team-a", pod, of),
        lineage=Lineage("c0" if parent else "", parent, uid),
    )
    write_manifest(directory, sign(manifest, signing_key(config)), durable=False)
    return manifest


def spec(directory: Path, *, sandbox: str = "s", **annotations: str) -> Spec:
    marks = {
        CONTAINER_TYPE: "container", POD_NAMESPACE: "team-a", POD_NAME: "web-0", POD_UID: "uid-1",
        CONTAINER_NAME: "main", SANDBOX_ID: sandbox,
    }  # fmt: skip
    pod = directory / "pods/uid-1"
    pod.mkdir(parents=True, exist_ok=True)
    mounts = [{"source": f"{pod}/etc-hosts", "destination": "/etc/hosts"}]
    return Spec({"annotations": {**marks, **{k: v for k, v in annotations.items() if v}}, "mounts": mounts})


def chosen(config: Config, wanted: str, *, restart: str = "", **fields: str) -> str:
    """Return the name of the image that the container starts from, "" for none."""
    config_json = spec(config.work_root.parent, **{RESTORE_FROM: wanted, ON_RESTART: restart}, **fields)
    runs = PodRuns.of(config_json, config.work_root)
    found = asyncio.run(
        chosen_image.image_for(
            wire.CreateTaskRequest(id="c"), RuntimeOptions(), wanted_image(config_json, config), config_json, config,
            runs, structlog.get_logger(), {},
        )
    )  # fmt: skip
    return found.path.name if found is not None else ""


def ran(config: Config, *images: str, seconds: float = 5.0) -> None:
    runs = PodRuns.of(spec(config.work_root.parent), config.work_root)
    assert runs is not None
    for image in images:
        runs.add(Run(image, seconds))


def test_container_that_starts_again_has_the_newest_image_that_it_wrote(config: Config) -> None:
    first = made(config, "first")
    assert chosen(config, "first") == "first"
    ran(config, first.id)
    assert chosen(config, "first") == "first"
    made(config, "second", 1, uid="uid-1", container="c1", parent=first.id)
    made(config, "foreign", 2, uid="uid-2", container="c2", parent=first.id)
    made(config, "sidecars", 3, uid="uid-1", container="c3", of="sidecar")
    assert chosen(config, "first") == "second"
    assert chosen(config, "first", restart="same") == "first"
    assert chosen(config, "first", restart="fresh") == ""


def test_image_that_is_gone_is_refused_at_the_first_start_alone(config: Config, fetched: list[str]) -> None:
    with pytest.raises(CheckpointNotFound):
        chosen(config, "first")
    ran(config, "id of first")
    assert chosen(config, "first") == ""
    assert fetched == ["first", "first"]
    with pytest.raises(CheckpointNotFound):
        chosen(config, "first", restart="same")


def test_image_that_holds_the_end_is_left_aside(config: Config) -> None:
    first = made(config, "first")
    ran(config, first.id, first.id)
    assert chosen(config, "first") == "first"
    ran(config, first.id)
    assert chosen(config, "first") == ""
    assert chosen(config, "first", restart="same") == "first"
    made(config, "second", 1, uid="uid-1", container="c1", parent=first.id)
    assert chosen(config, "first") == "second"


def test_latest_begins_fresh_and_continues_where_a_pod_of_the_name_was(config: Config) -> None:
    assert chosen(config, "latest") == ""
    made(config, "first", pod="web-1")
    assert chosen(config, "latest") == ""
    made(config, "second", 1)
    assert chosen(config, "latest") == "second"
    assert chosen(config, "first@latest") == "second"
    with pytest.raises(Refused, match="expected NAME, NAME@"):
        chosen(config, "first@newest")
    with pytest.raises(Refused, match="expected fresh, same or latest"):
        chosen(config, "first", restart="often")


def stored(config: Config, manifest: Manifest, name: str) -> KnownImage:
    """Move an image to where only an agent knows it."""
    shutil.rmtree(config.checkpoint_root / "team-a" / name)
    return KnownImage.of(name, manifest)


def test_latest_is_found_where_only_the_agent_knows_it(
    config: Config, fetched: list[str], elsewhere: list[KnownImage]
) -> None:
    made(config, "second", 2)
    third = made(config, "third", 3, uid="uid-3", container="c3", parent="id of second")
    elsewhere += [stored(config, third, "third"), stored(config, made(config, "first", 1), "first")]
    elsewhere.append(KnownImage.of("copy-of-second", made(config, "copy", 1)))
    elsewhere[-1] = replace(elsewhere[-1], id="id of second")
    shutil.rmtree(config.checkpoint_root / "team-a/copy")
    for wanted in ("latest", "second@latest", "first@latest"):
        with pytest.raises(CheckpointNotFound):  # the agent that is asked for it here brings none
            chosen(config, wanted)
    assert fetched == ["third", "third", "third"]
    assert chosen(config, "second") == "second"  # that one is named


def test_container_that_starts_again_has_its_newest_image_back_from_elsewhere(
    config: Config, fetched: list[str], elsewhere: list[KnownImage]
) -> None:
    made(config, "first")
    ran(config, "id of first")
    own = made(config, "second", 1, uid="uid-1", container="c1", parent="id of first")
    elsewhere.append(stored(config, own, "second"))
    assert chosen(config, "first") == ""  # it can be had no more, and what is older is not its state
    assert fetched == ["second"]
    assert chosen(config, "first", restart="same") == "first"


def test_agent_that_does_not_answer_keeps_a_pod_from_an_older_image(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: Any) -> tuple[KnownImage, ...]:
        raise ImageNotFetched("the node's agent does not say")

    monkeypatch.setattr(chosen_image, "related", silent)
    made(config, "first")
    assert chosen(config, "first") == "first"
    for wanted in ("latest", "first@latest"):
        with pytest.raises(ImageNotFetched):
            chosen(config, wanted)
    ran(config, "id of first")
    assert chosen(config, "first") == "first"


def test_pod_names_no_image_by_path_but_root_may_for_what_was_a_pods(config: Config) -> None:
    made(config, "first")
    path = str(config.checkpoint_root / "team-a/first")
    with pytest.raises(Refused, match=r"pods name images by their name.*Nothing was restored"):
        chosen(config, path)
    assert chosen(config, path, sandbox="") == "first"
    trusted = replace(config, trusted_roots=(config.checkpoint_root / "team-a",))
    assert chosen(trusted, path) == "first"


def test_restore_without_a_pod_takes_the_image_that_is_named(config: Config) -> None:
    """Root restores an older image of a pod: that the pod has written a newer one does not count."""
    made(config, "first")
    made(config, "second", 1, uid="uid-1", container="c1", parent="id of first")
    assert chosen(config, str(config.checkpoint_root / "team-a/first"), sandbox="") == "first"


def test_images_that_cannot_be_read_are_left_out(config: Config) -> None:
    made(config, "first")
    (config.checkpoint_root / "team-a/unfinished").mkdir()
    broken = config.checkpoint_root / "team-a/broken"
    broken.mkdir()
    (broken / "kybernate-manifest.json").write_text('"uid-0"')
    (config.checkpoint_root / "team-a/.hidden").mkdir()
    assert [image.name for image in images_of("team-a", ["uid-0"], config)] == ["first"]
    assert images_of("team-a", ["uid-9", ""], config) == ()
    assert images_of("team-b", ["uid-0"], config) == ()
    for namespace in ("", "../root/team-a", "team-a/../team-a", "."):
        assert images_of(namespace, ["uid-0"], config) == ()
    memory = replace(config, memory_root=config.checkpoint_root)
    assert [image.name for image in images_of("team-a", ["uid-0"], memory)] == ["first"]
