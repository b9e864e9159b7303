"""Keys that sign manifests: made once, read with suspicion, rotated without a gap."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate_shim.config import Config
from kybernate_shim.errors import Refused
from kybernate_shim.trust.keys import read_key, rotate, signing_key, verifying_keys


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(key_directory=tmp_path / "keys")


def test_the_node_key_is_made_at_first_use_and_is_roots_alone(config: Config) -> None:
    assert verifying_keys(config).keys == ()
    key = signing_key(config)
    assert signing_key(config) == key == verifying_keys(config).keys[0]
    assert (config.key_directory / "node.key").stat().st_mode & 0o777 == 0o600
    assert config.key_directory.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in config.key_directory.iterdir()] == ["node.key"]


def test_a_shared_key_signs_where_it_is_configured(config: Config, tmp_path: Path) -> None:
    node = signing_key(config)
    shared = tmp_path / "shared"
    shared.write_text("ab" * 32 + "\n")
    shared.chmod(0o600)
    both = Config(key_directory=config.key_directory, shared_key=shared)
    assert signing_key(both).secret == b"\xab" * 32
    assert {key.id for key in verifying_keys(both).keys} == {node.id, signing_key(both).id}


def test_a_shared_key_of_the_past_stays_a_shared_one(config: Config) -> None:
    signing_key(config)
    past = config.key_directory / "shared-2026.key"
    past.write_text("cd" * 32)
    past.chmod(0o600)
    assert [key.shared for key in verifying_keys(config).keys] == [False, True]


def test_a_rotated_key_stays_valid_until_its_file_is_gone(config: Config) -> None:
    first = signing_key(config)
    old, new = rotate(config)
    assert old is not None
    assert old.id == first.id != new.id == signing_key(config).id
    assert {key.id for key in verifying_keys(config).keys} == {old.id, new.id}
    old.source.unlink()
    assert [key.id for key in verifying_keys(config).keys] == [new.id]


def test_a_signature_belongs_to_one_content_and_one_key(config: Config) -> None:
    old, new = signing_key(config), rotate(config)[1]
    signature = new.sign(b"content")
    assert new.has_signed(b"content", signature)
    assert not new.has_signed(b"Content", signature)
    assert not old.has_signed(b"content", signature)
    assert new.secret.hex() not in new.id + signature


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("ab" * 32, 0o640, "mode 0640"),
        ("ab" * 31, 0o600, "32 bytes"),
        ("xyz", 0o600, "32 bytes"),
        ("", 0o600, "32 bytes"),
    ],
)
def test_a_doubtful_key_is_refused(tmp_path: Path, content: str, mode: int, words: str) -> None:
    path = tmp_path / "k"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(Refused, match=words):
        read_key(path)


def test_a_link_or_a_fifo_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("ab" * 32)
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo", "absent"):
        with pytest.raises(Refused, match="key"):
            read_key(tmp_path / name)
