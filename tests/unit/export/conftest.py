"""Small images, small parts, and no pauses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate.export import download, layers, registry_client, upload
from kybernate_shim.checkpoint.image.store import Image, read_image
from kybernate_shim.config import Config
from tests.unit.cli.saved_image import save


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(download, "PART", 3000)
    monkeypatch.setattr(upload, "PART", 4000)
    monkeypatch.setattr(layers, "ALONE", 10_000)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    config = Config(checkpoint_root=tmp_path / "images", key_directory=tmp_path / "keys", audit_log=None)
    load: Callable[[], Config] = lambda: config  # noqa: E731
    monkeypatch.setattr(Config, "load", load)
    return config


@pytest.fixture
def image(config: Config) -> Image:
    directory = config.checkpoint_root / "shop" / "i"
    save(directory, namespace="shop", pod="front", name="web", image="registry:5000/web:1", image_digest="sha256:ab")
    return read_image(directory)


def content(directory: Path) -> dict[str, bytes]:
    """Return the files of an image."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}
