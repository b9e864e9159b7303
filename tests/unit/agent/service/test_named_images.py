"""An image is answered under the name by which it was asked for, and is known as soon as it is named."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate.agent.service.checkpoints import Checkpoints
from kybernate.agent.service.peer_images import PeerImages
from kybernate.agent.storage.replicas import Replicas
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Ambiguous
from kybernate.registry.catalogue import Catalogue
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import signing_key
from tests.fakes.images import write_image


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Checkpoints]:
    """A service over a node with `m1`, and `m2`, which was copied by hand and of which no registry has heard."""
    root = tmp_path / "images"
    root.mkdir(mode=0o700)
    config = replace(Config(), checkpoint_root=root, key_directory=tmp_path / "keys", audit_log=None)
    write_image(root / "m1", signing_key(config), id="3f6b-1")
    with Catalogue(f"sqlite:///{tmp_path}/registry.db", node="node-1") as catalogue:
        replicas = Replicas(lambda: catalogue, lambda: config)
        replicas.look_for("m1")
        shutil.copytree(root / "m1", root / "m2")
        unused: Any = None
        yield Checkpoints(lambda: catalogue, unused, lambda image: None, replicas.look_for)


def test_answer_has_the_name_that_was_given(service: Checkpoints) -> None:
    async def pinned(name: str) -> wire.Image:
        return await service.PinImage(wire.PinImageRequest(image=name, pinned=True), None)

    async def scenario() -> None:
        assert [(await pinned(name)).name for name in ("m2", "m1", "3f6b-1")] == ["m2", "m1", "m1"]
        image = await service.GetImage(wire.GetImageRequest(image="m2"), None)
        assert (image.name, image.pinned, [one.name for one in image.replicas]) == ("m2", True, ["m1", "m2"])
        labelled = await service.LabelImage(wire.LabelImageRequest(image="m2", labels={"a": "b"}), None)
        assert (labelled.name, dict(labelled.labels)) == ("m2", {"a": "b"})

    asyncio.run(scenario())


def test_other_node_is_given_the_copy_that_it_names(service: Checkpoints) -> None:
    asyncio.run(service.GetImage(wire.GetImageRequest(image="m2"), None))
    unused: Any = None
    images = PeerImages(service._catalogue, unused)
    assert [images._replica(name).name for name in ("m2", "m1", "3f6b-1")] == ["m2", "m1", "m1"]


def test_name_of_two_images_changes_none(service: Checkpoints, tmp_path: Path) -> None:
    config = replace(Config(), key_directory=tmp_path / "keys", audit_log=None)
    write_image(tmp_path / "images/shop/m1", signing_key(config), id="3f6b-2", namespace="shop")

    async def scenario() -> None:
        for name in ("m1", "3f6b"):
            with pytest.raises(Ambiguous, match="2 images"):
                await service.PinImage(wire.PinImageRequest(image=name, pinned=True), None)
        place = f"{tmp_path}/images/m1"
        assert not (await service.GetImage(wire.GetImageRequest(image=place), None)).pinned
        assert (await service.GetImage(wire.GetImageRequest(image="shop/m1"), None)).id == "3f6b-2"

    asyncio.run(scenario())
