"""A dump on a node that encrypts."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.image import encrypted
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.errors import Failed, NoRoom, Refused
from tests.unit.checkpoint.dump.dumping import run
from tests.unit.checkpoint.fake_target import FakeTarget


@pytest.fixture
def encrypting(target: FakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """The same container on a node that encrypts; its directory in memory is `staged`."""
    key = tmp_path / "image.key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    target.config = replace(target.config, encryption_key=key)
    staged = tmp_path / "staged"

    @contextmanager
    def staging(name: str) -> Iterator[Path]:
        staged.mkdir()
        try:
            yield staged
        finally:
            target.steps.append("staging removed")
            shutil.rmtree(staged)

    async def write(argv: Sequence[str]) -> int:
        (staged / "inventory.img").write_bytes(b"inventory")
        assert not any(target.image.iterdir())
        return 0

    encrypt_files = encrypted.encrypt_files

    def noted(*arguments: Any, **options: Any) -> Any:
        target.steps.append("encrypt")
        return encrypt_files(*arguments, **options)

    monkeypatch.setattr("kybernate_shim.checkpoint.image.plaintext_memory.memory_for_plaintext", staging)
    monkeypatch.setattr(encrypted, "encrypt_files", noted)
    target.children.on["checkpoint"] = write
    return target


def test_container_runs_while_its_image_is_encrypted(encrypting: FakeTarget) -> None:
    run(encrypting)
    assert encrypting.steps == ["freeze", "checkpoint", "thaw", "encrypt", "staging removed"]
    assert {path.name for path in encrypting.image.iterdir()} == {NAME, "inventory.img.enc", "kybernate-spec.json.enc"}
    assert [step.name for step in read_image(encrypting.image).manifest.steps][-1] == "encrypt"


def test_container_that_ends_is_killed_once_its_image_is_encrypted(encrypting: FakeTarget) -> None:
    run(encrypting, exit=True)
    assert encrypting.steps == ["freeze", "checkpoint", "encrypt", "kill with an image", "staging removed"]


def test_nothing_is_left_when_the_disk_is_full_for_the_encrypted_files(
    encrypting: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(encrypted, "encrypt_files", full)
    with pytest.raises(Failed, match="No space left"):
        run(encrypting, exit=True)
    assert not encrypting.image.exists()
    assert encrypting.steps == ["freeze", "checkpoint", "thaw", "staging removed"]


def test_checkpoint_is_refused_without_memory_for_its_plain_files(
    encrypting: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kybernate_shim.checkpoint.image.plaintext_memory.available_bytes", lambda: 10 << 20)
    with pytest.raises(NoRoom, match="10 MiB are available: nothing was changed"):
        run(encrypting)
    assert not encrypting.image.exists()
    assert encrypting.steps == ["staging removed"]


def test_unusable_key_refuses_the_checkpoint_before_anything_is_done(encrypting: FakeTarget) -> None:
    assert encrypting.config.encryption_key is not None
    encrypting.config.encryption_key.chmod(0o644)
    with pytest.raises(Refused, match="nothing was changed"):
        run(encrypting)
    assert not encrypting.image.exists()
    assert encrypting.steps == []
