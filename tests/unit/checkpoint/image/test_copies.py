"""A copy of an image in memory is read in its place, and only where it is the same image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.node.deleting import delete
from kybernate.node.failure import Refused
from kybernate_shim.checkpoint.image.copies import in_use, root_of, still_there
from kybernate_shim.checkpoint.image.locate import locate
from kybernate_shim.checkpoint.image.requested import Wanted
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.config import Config
from kybernate_shim.trust.requester import Requester
from tests.fakes.sized_image import write_sized_image

NAME = "team-a/web"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tmp_path.chmod(0o700)
    return replace(Config(), checkpoint_root=tmp_path / "disk", memory_root=tmp_path / "memory")


def on_disk(config: Config) -> Path:
    write_sized_image(config.checkpoint_root / NAME, id="1", mib=1)
    return config.checkpoint_root / NAME


def in_memory(config: Config, *, id: str = "") -> Path:
    assert config.memory_root is not None
    copy = config.memory_root / NAME
    if id:
        write_sized_image(copy, id=id, mib=1)
        return copy
    copy.mkdir(parents=True)
    for path in (config.checkpoint_root / NAME).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_copy_is_read_where_it_is_the_same_image(config: Config) -> None:
    assert root_of(NAME, config) == config.checkpoint_root
    on_disk(config)
    assert root_of(NAME, config) == config.checkpoint_root
    in_memory(config)
    assert root_of(NAME, config) == config.memory_root
    assert root_of(NAME, replace(config, memory_root=None)) == config.checkpoint_root


def test_copy_of_an_image_that_was_replaced_is_not_read(config: Config) -> None:
    on_disk(config)
    in_memory(config, id="2")
    assert root_of(NAME, config) == config.checkpoint_root


def test_copy_that_is_alone_on_the_node_is_read(config: Config) -> None:
    in_memory(config, id="2")
    assert root_of(NAME, config) == config.memory_root


def test_a_pods_name_means_the_copy(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(config)
    copy = in_memory(config)
    for directory in (copy, copy.parent, copy.parent.parent):
        directory.chmod(0o700)
    pod = Requester("tenant", namespace="team-a", pod="web-1")
    wanted = Wanted("web", "annotation")
    assert locate(wanted, pod, config) == copy
    with pytest.raises(Exception, match="not the name of an image"):
        locate(Wanted("../team-a/web", "annotation"), pod, config)


def test_copy_that_goes_before_the_start_is_replaced_by_the_one_on_the_disk(config: Config) -> None:
    place = on_disk(config)
    copy = in_memory(config)
    image = read_image(copy)
    assert still_there(image, config) == image
    delete(copy, "1")
    assert still_there(image, config).path == place


def test_image_that_is_read_is_not_removed(config: Config) -> None:
    place = on_disk(config)
    with in_use(place), in_use(place), pytest.raises(Refused, match="is in use"):
        delete(place, "1")
    assert read_image(place)
    delete(place, "1")
    assert not place.exists()
