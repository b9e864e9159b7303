"""A checkpoint image is encrypted or decrypted where it lies.

At any moment its manifest names one form of the image that is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from kybernate_shim.checkpoint.image.encrypted import (
    CipherRun,
    data_key_of,
    decrypt_files,
    encrypt_files,
    plain_manifest,
)
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.image.signature import sign, signer_of
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Image, read_image, write_manifest
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused
from kybernate_shim.linux.locks import held, try_lock_directory
from kybernate_shim.trust import encryption_keys
from kybernate_shim.trust.encryption import SUFFIX, EncryptionBroken
from kybernate_shim.trust.keys import Key, signing_key, verifying_keys

EncryptionChange = Literal["encrypted", "decrypted", "wrapped again", "nothing to do"]


def encrypt_image(
    directory: Path, encryption_key: Path, config: Config, run: CipherRun | None = None
) -> tuple[Image, EncryptionChange]:
    """Encrypt an image where it is, with the first key of the file; only its data key where it is encrypted already.

    At any moment the manifest names one form of the image that is whole: files of the new form come first, those of the
    old one go last. What a run that was killed has left is removed by the next one. An image that was signed is signed
    again. Raises CheckpointNotFound, CheckpointInvalid, Refused, OSError and Stopped.
    """
    key = encryption_keys.read_keys(encryption_key)[0]
    with _locked(directory):
        image = read_image(directory)
        manifest = image.manifest
        signer = _signer(image, config)
        if manifest.encryption is None:
            _unlink(directory, (f"{file.name}{SUFFIX}" for file in manifest.files))
            names = [file.name for file in manifest.files]
            with _removed_on_failure(directory, (f"{name}{SUFFIX}" for name in names)):
                sealed = encrypt_files(names, directory, directory, image=manifest.id, key=key, run=run)
            _write_signed(directory, sealed.manifest(manifest), signer)
            outcome: EncryptionChange = "encrypted"
        elif manifest.encryption.key_id != key.id:
            wrapped = key.wrap(data_key_of(manifest, encryption_key), manifest.id)
            encryption = replace(manifest.encryption, key_id=wrapped.key_id, wrapped_key=wrapped.wrapped)
            _write_signed(directory, replace(manifest, encryption=encryption), signer)
            outcome = "wrapped again"
        else:
            outcome = "nothing to do"
        _unlink(directory, (file.name for file in manifest.files))
        return read_image(directory), outcome


def decrypt_image(
    directory: Path, encryption_key: Path | None, config: Config, run: CipherRun | None = None
) -> tuple[Image, EncryptionChange]:
    """Decrypt an image where it is, as safely as `encrypt_image`. Raises as that."""
    with _locked(directory):
        image = read_image(directory)
        manifest, plain = image.manifest, plain_manifest(image.manifest)
        names = [file.name for file in manifest.files]
        outcome: EncryptionChange = "nothing to do"
        if manifest.encryption is not None:
            signer = _signer(image, config)
            data_key = data_key_of(manifest, encryption_key)
            _unlink(directory, names)
            with _removed_on_failure(directory, names), _as_invalid(directory):
                decrypt_files(manifest.files, directory, directory, image=manifest.id, data_key=data_key, run=run)
            _write_signed(directory, plain, signer)
            outcome = "decrypted"
        _unlink(directory, (f"{name}{SUFFIX}" for name in names))
        return read_image(directory), outcome


def _signer(image: Image, config: Config) -> Key | None:
    """Return the key that signs the image in its new form; None for an image that is not signed.

    Raises Refused: who signs a manifest again vouches for it.
    """
    if not image.manifest.signature.key:
        return None
    signer_of(image.content, image.manifest, verifying_keys(config))
    return signing_key(config)


def _write_signed(directory: Path, manifest: Manifest, key: Key | None) -> None:
    write_manifest(directory, sign(manifest, key) if key is not None else manifest)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    try:
        lock = try_lock_directory(directory)
    except FileNotFoundError:
        yield  # `read_image` says what is missing
        return
    with held(lock) as ours:
        if not ours:
            raise Refused(f"{directory}: another process is encrypting or decrypting it; wait for its end")
        yield


@contextmanager
def _removed_on_failure(directory: Path, names: Iterable[str]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _unlink(directory, names)
        raise


@contextmanager
def _as_invalid(directory: Path) -> Iterator[None]:
    """Let an EncryptionBroken be a CheckpointInvalid, which names the image."""
    try:
        yield
    except EncryptionBroken as error:
        raise CheckpointInvalid(f"{directory}: {error}") from error


def _unlink(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)
