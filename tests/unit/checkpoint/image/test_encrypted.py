"""An encrypted image as a whole: both forms, the digests of what is in it, and a crash at any moment of a change."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.image import encrypted, encryption_in_place
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.encrypted import (
    CipherRun,
    data_key_of,
    decrypt_files,
    memory_bytes,
    plain_manifest,
    read_file,
)
from kybernate_shim.checkpoint.image.encryption_in_place import decrypt_image, encrypt_image
from kybernate_shim.checkpoint.image.manifest import (
    NAME,
    File,
    Host,
    Manifest,
    Program,
    Source,
    decode,
    encode,
)
from kybernate_shim.checkpoint.image.signature import sign, signer_of
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Problem, read_image, write_manifest
from kybernate_shim.checkpoint.image.verification import problems_of, verify
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused, Stopped
from kybernate_shim.linux.locks import held, try_lock_directory
from kybernate_shim.trust.keys import signing_key, verifying_keys
from kybernate_shim.vram_io import digest as vram_digest
from kybernate_shim.vram_io import file_digests
from kybernate_shim.vram_io.image_files import VramFile
from kybernate_shim.vram_io.thread_pool import CopyOptions

MIB = 1 << 20
SECRET = b"what the container has in memory"


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "image.key", "11" * 32)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(key_directory=tmp_path / "keys")


def write_keys(path: Path, *keys: str) -> Path:
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return path


@pytest.fixture
def image(tmp_path: Path, config: Config) -> Path:
    """A signed image with an empty file, a small one, one of several pieces with a hole, and one with VRAM."""
    directory = tmp_path / "image"
    directory.mkdir()
    (directory / "empty.img").touch()
    (directory / "core-1.img").write_bytes(SECRET)
    with (directory / "pages-1.img").open("wb") as pages:
        pages.write(random.Random(1).randbytes(3 * MIB + 5))
        pages.seek(66 * MIB)
        pages.write(SECRET)
    with (directory / "kybernate-vram-1-0.bin").open("wb") as vram:
        vram.truncate(4 * MIB)
        vram.seek(MIB)
        vram.write(SECRET)
    how = CopyOptions(digest=vram_digest.STRONG)
    digest = file_digests.of_file(directory / "kybernate-vram-1-0.bin", 1536 << 10, how)
    with Digester() as digester:
        files = digester.files(directory, ["core-1.img", "empty.img", "pages-1.img"])
    manifest = Manifest(
        id="3f6b",
        time="2026-11-21T05:00:00.000Z",
        source=Source("c"),
        runtime=Program("runc", "1.3.0"),
        criu=Program("criu", "4.2"),
        host=Host("6.18.0", "x86_64", (), 2, 4096),
        vram=(VramFile(1, "kybernate-vram-1-0.bin", 0, 4 * MIB, MIB, digest),),
        files=(*files, File("kybernate-vram-1-0.bin", 4 * MIB, digest)),
    )
    write_manifest(directory, sign(manifest, signing_key(config)), durable=False)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != NAME}


def staged(image: Path, keys: Path, target: Path, run: CipherRun | None = None) -> Manifest:
    """Decrypt an image as a restore does."""
    target.mkdir()
    manifest = read_image(image).manifest
    data_key = data_key_of(manifest, keys)
    decrypt_files(manifest.files, image, target, image=manifest.id, data_key=data_key, run=run)
    return plain_manifest(manifest)


def test_image_is_encrypted_and_decrypted_in_place(image: Path, keys: Path, config: Config) -> None:
    before = contents(image)
    found, outcome = encrypt_image(image, keys, config)
    assert outcome == "encrypted"
    assert set(contents(image)) == {f"{name}.enc" for name in before}
    assert not [name for name, content in contents(image).items() if SECRET in content]
    assert verify(image, encryption_key=keys) == []
    assert found.manifest.encryption is not None
    assert decrypt_image(image, keys, config)[1] == "decrypted"
    assert contents(image) == before
    assert verify(image) == []
    assert read_image(image).manifest.encryption is None


def test_doing_it_again_changes_nothing(image: Path, keys: Path, config: Config) -> None:
    assert decrypt_image(image, None, config)[1] == "nothing to do"
    encrypt_image(image, keys, config)
    before = contents(image)
    assert encrypt_image(image, keys, config)[1] == "nothing to do"
    assert contents(image) == before


def test_holes_take_no_room_in_either_form(image: Path, keys: Path, config: Config, tmp_path: Path) -> None:
    encrypt_image(image, keys, config)
    manifest = read_image(image).manifest
    assert sum(path.stat().st_size for path in image.glob("*.enc")) < 8 * MIB
    assert memory_bytes(manifest.files) < 8 * MIB
    staged(image, keys, tmp_path / "staged")
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "staged").iterdir()) < 8 * MIB


def test_restore_finds_the_plain_files_with_their_digests(
    image: Path, keys: Path, config: Config, tmp_path: Path
) -> None:
    before = contents(image)
    encrypt_image(image, keys, config)
    manifest = staged(image, keys, tmp_path / "staged")
    assert contents(tmp_path / "staged") == before
    assert problems_of(tmp_path / "staged", manifest) == []
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "staged").iterdir())


def test_progress_is_every_stored_byte_once(image: Path, keys: Path, config: Config) -> None:
    counted: list[int] = []
    encrypt_image(image, keys, config, CipherRun(counted.append))
    assert sum(counted) == len(SECRET) + 4 * MIB + len(SECRET) + MIB  # one chunk of the VRAM, five of the pages


def test_stopped_work_leaves_the_image_as_it_was(image: Path, keys: Path, config: Config) -> None:
    before = contents(image)
    run = CipherRun()
    run.stop.set()
    with pytest.raises(Stopped):
        encrypt_image(image, keys, config, run)
    assert contents(image) == before


# -- Signatures -------------------------------------------------------------------------------------------------------


def test_signed_image_is_signed_in_each_form(image: Path, keys: Path, config: Config) -> None:
    for change in (lambda: encrypt_image(image, keys, config), lambda: decrypt_image(image, keys, config)):
        found, _ = change()
        assert signer_of(found.content, found.manifest, verifying_keys(config)) == signing_key(config)


@pytest.mark.parametrize("form", ["plain", "encrypted"])
def test_forged_image_is_not_signed_by_a_change_of_its_form(image: Path, keys: Path, config: Config, form: str) -> None:
    if form == "encrypted":
        encrypt_image(image, keys, config)
    manifest = read_image(image).manifest
    write_manifest(image, replace(manifest, terminal=True))
    before = (image / NAME).read_bytes()
    with pytest.raises(Refused, match=r"sign|digests|belongs to|key"):
        (encrypt_image if form == "plain" else decrypt_image)(image, keys, config)
    assert (image / NAME).read_bytes() == before


# -- Keys -------------------------------------------------------------------------------------------------------------


def test_first_key_takes_over_an_image_without_its_files_being_written(image: Path, keys: Path, config: Config) -> None:
    encrypt_image(image, keys, config)
    before = contents(image)
    write_keys(keys, "22" * 32, "11" * 32)
    assert verify(image, encryption_key=keys) == []
    assert encrypt_image(image, keys, config)[1] == "wrapped again"
    assert contents(image) == before
    write_keys(keys, "22" * 32)
    assert verify(image, encryption_key=keys) == []


def test_image_without_its_key_stays_closed(image: Path, keys: Path, config: Config, tmp_path: Path) -> None:
    encrypt_image(image, keys, config)
    write_keys(keys, "22" * 32)
    tries: list[Callable[[], object]] = [
        lambda: verify(image, encryption_key=keys),
        lambda: verify(image),
        lambda: staged(image, keys, tmp_path / "staged"),
        lambda: decrypt_image(image, keys, config),
        lambda: encrypt_image(image, keys, config),
        lambda: read_file(read_image(image), "core-1.img", keys),
    ]
    before = contents(image)
    for attempt in tries:
        with pytest.raises(Refused, match="key"):
            attempt()
    assert contents(image) == before


def test_wrapped_key_of_another_image_is_refused(image: Path, keys: Path, config: Config) -> None:
    encrypt_image(image, keys, config)
    write_manifest(image, replace(read_image(image).manifest, id="another"))
    with pytest.raises(CheckpointInvalid, match="another"):
        verify(image, encryption_key=keys)


# -- Damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["empty.img", "core-1.img", "pages-1.img", "kybernate-vram-1-0.bin"])
def test_flipped_bit_is_named_and_nothing_is_decrypted(
    image: Path, keys: Path, config: Config, tmp_path: Path, name: str
) -> None:
    encrypt_image(image, keys, config)
    flip(image / f"{name}.enc")
    assert [(one.file, one.kind) for one in verify(image, encryption_key=keys)] == [(f"{name}.enc", "unreadable")]
    with pytest.raises(Exception, match=name):
        staged(image, keys, tmp_path / "staged")
    with pytest.raises(CheckpointInvalid, match=name):
        decrypt_image(image, keys, config)
    assert not [path for path in image.iterdir() if path.suffix in (".img", ".bin")]


def test_content_that_has_not_its_digest_is_found(image: Path, keys: Path, config: Config) -> None:
    digests = {"core-1.img": "xxh128:" + "0" * 32, "kybernate-vram-1-0.bin": f"blake3-tree:{MIB}:" + "0" * 64}
    encrypt_image(image, keys, config)
    manifest = read_image(image).manifest
    files = tuple(replace(file, digest=digests.get(file.name, file.digest)) for file in manifest.files)
    vram = tuple(replace(file, digest=digests.get(file.file, file.digest)) for file in manifest.vram)
    write_manifest(image, replace(manifest, files=files, vram=vram))
    assert [(one.file, one.kind) for one in verify(image, encryption_key=keys)] == [
        ("core-1.img.enc", "changed"),
        ("kybernate-vram-1-0.bin.enc", "changed"),
    ]


def test_missing_and_further_files_are_found(image: Path, keys: Path, config: Config) -> None:
    encrypt_image(image, keys, config)
    (image / "core-1.img.enc").rename(image / "core-1.img")
    problems: list[Problem] = verify(image, encryption_key=keys)
    assert {(one.file, one.kind) for one in problems} == {("core-1.img", "extra"), ("core-1.img.enc", "missing")}
    with pytest.raises(CheckpointInvalid, match=r"core-1\.img\.enc: missing"):
        read_image(image)


def test_one_file_can_be_read(image: Path, keys: Path, config: Config) -> None:
    assert read_file(read_image(image), "core-1.img", None) == SECRET
    encrypt_image(image, keys, config)
    found = read_image(image)
    assert read_file(found, "core-1.img", keys) == SECRET
    assert read_file(found, "empty.img", keys) == b""
    with pytest.raises(FileNotFoundError):
        read_file(found, "core-2.img", keys)
    flip(image / "core-1.img.enc")
    with pytest.raises(CheckpointInvalid, match=r"core-1\.img"):
        read_file(found, "core-1.img", keys)


# -- Crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["encrypt", "decrypt"])
def test_image_is_whole_in_one_form_wherever_a_change_ends(
    image: Path, keys: Path, config: Config, direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change: Callable[..., Any] = encrypt_image if direction == "encrypt" else decrypt_image
    if direction == "decrypt":
        encrypt_image(image, keys, config)
    plain = [file.name for file in read_image(image).manifest.files]
    steps = ("creating", "manifest", "unlink 0", "unlink 1", "unlink 3", "unlink 5", "unlink 7")
    for step in steps:
        copy = tmp_path / f"{direction}-{step}"
        subprocess.run(["cp", "-r", "--sparse=always", image, copy], check=True)
        with monkeypatch.context() as patch:
            crash_at(patch, step)
            with pytest.raises(Crash):
                change(copy, keys, config)
        found = verify(copy, encryption_key=keys)
        assert {problem.kind for problem in found} <= {"extra"}, (step, found)
        change(copy, keys, config)
        assert verify(copy, encryption_key=keys) == []
        suffix = ".enc" if direction == "encrypt" else ""
        assert set(contents(copy)) == {f"{name}{suffix}" for name in plain}
        shutil.rmtree(copy)


def crash_at(patch: pytest.MonkeyPatch, step: str) -> None:
    """End the process, without any cleaning up, before a step of a change."""
    kind, _, number = step.partition(" ")
    crashed = False
    creating, unlink, write = encrypted._creating, Path.unlink, encryption_in_place.write_manifest
    left = [int(number or 0)]

    def end() -> None:
        nonlocal crashed
        crashed = True
        raise Crash

    def maybe_creating(path: Path) -> Any:
        if crashed or (kind == "creating" and path.name.startswith("pages")):
            end()
        return creating(path)

    def maybe_unlink(path: Path, missing_ok: bool = False) -> None:
        if crashed or (kind == "unlink" and not left[0]):
            end()
        left[0] -= 1
        unlink(path, missing_ok=missing_ok)

    def maybe_write(*arguments: Any, **options: Any) -> str:
        if kind == "manifest":
            end()
        return write(*arguments, **options)

    patch.setattr(encrypted, "_creating", maybe_creating)
    patch.setattr(Path, "unlink", maybe_unlink)
    patch.setattr(encryption_in_place, "write_manifest", maybe_write)


def test_two_changes_at_once_are_refused(image: Path, keys: Path, config: Config) -> None:
    with held(try_lock_directory(image)) as ours:
        assert ours
        with pytest.raises(Refused, match="another process is encrypting or decrypting it"):
            encrypt_image(image, keys, config)


# -- The manifest -----------------------------------------------------------------------------------------------------


def test_manifest_of_an_encrypted_image_is_read_back(image: Path, keys: Path, config: Config) -> None:
    manifest = encrypt_image(image, keys, config)[0].manifest
    assert decode(encode(manifest)) == manifest
    assert [file.name for file in manifest.stored_files] == [f"{file.name}.enc" for file in manifest.files]
    assert all(
        (image / kept.name).stat().st_size == kept.size == file.stored
        for kept, file in zip(manifest.stored_files, manifest.files, strict=True)
    )


def test_manifest_of_a_plain_image_says_so(image: Path) -> None:
    manifest = read_image(image).manifest
    assert manifest.encryption is None
    assert manifest.stored_files == manifest.files
    assert b'"encryption": null' in encode(manifest)
