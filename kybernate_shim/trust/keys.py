"""The keys by which a node recognizes its own checkpoint images, and signatures over manifests.

A signature is an HMAC-SHA-256 over the whole manifest. The manifest lists the size and digest of every file, so it
covers the whole image. Two kinds of keys sign:

- the *node key*, `node.key` in the key directory. The node makes it when it signs its first image.
- a *shared key*, a file that the node's configuration names (`shared_key`). Nodes that exchange images have the same
one. Where it is configured, it signs new images.

Every file `*.key` in the key directory verifies. So a rotated key stays valid until its file is removed. One whose name
begins with `shared-` is a former shared key: images that it signed need strong digests. A key file
holds 32 bytes in hexadecimal. It belongs to root and no other user can read it; other files are refused.

The identifier of a key is the beginning of a SHA-256 over it, which reveals nothing about the key.
Source for the construction: RFC 2104; NIST SP 800-107, 5.3.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kybernate_shim.errors import Refused
from kybernate_shim.linux.atomic_write import replace_file
from kybernate_shim.linux.plain_files import NotPlain, open_plain
from kybernate_shim.trust.places import make_private

if TYPE_CHECKING:
    from kybernate_shim.config import Config

KEY_BYTES: Final = 32
NODE_KEY: Final = "node.key"
SHARED: Final = "shared-"
SUFFIX: Final = ".key"
DOMAIN: Final = b"kybernate manifest signature 1\0"
ID_DOMAIN: Final = b"kybernate key identifier 1\0"
ID_DIGITS: Final = 16
MOST_BYTES: Final = 1 << 16  # of a file with keys


@dataclass(frozen=True)
class Key:
    """A signing key. `shared`: other nodes have it, too. `source` is its file."""

    secret: bytes
    source: Path
    shared: bool = False

    @property
    def id(self) -> str:
        """The identifier that a manifest names it by."""
        return _sha256_hex(ID_DOMAIN + self.secret)[:ID_DIGITS]

    def sign(self, content: bytes) -> str:
        """Return the signature of `content` as hexadecimal digits."""
        import hmac  # a checkpoint or a restore is rare in a daemon's life

        return hmac.new(self.secret, DOMAIN + content, "sha256").hexdigest()

    def has_signed(self, content: bytes, signature: str) -> bool:
        """Return whether `signature` is this key's signature of `content`; takes constant time."""
        import hmac

        return hmac.compare_digest(self.sign(content), signature)


@dataclass(frozen=True)
class KeyRing:
    """The keys of a node. `signer` makes new signatures, every key verifies."""

    keys: tuple[Key, ...]
    unusable: tuple[str, ...] = ()  # why files were left out

    def find(self, id: str) -> Key | None:
        """Return the key with that identifier."""
        return next((key for key in self.keys if key.id == id), None)


def verifying_keys(config: Config) -> KeyRing:
    """Return all keys that are valid on this node, and why others are not; no key is made."""
    wanted = [(config.shared_key, True)] if config.shared_key else []
    wanted += [(path, path.name.startswith(SHARED)) for path in key_files(config.key_directory)]
    keys, unusable = [], []
    for path, shared in wanted:
        try:
            keys.append(read_key(path, shared=shared))
        except Refused as error:
            unusable.append(str(error))
    return KeyRing(tuple(keys), tuple(unusable))


def signing_key(config: Config) -> Key:
    """Return the key that signs new images; the node key is made if there is none yet. Raises Refused, OSError."""
    if config.shared_key:
        return read_key(config.shared_key, shared=True)
    path = config.key_directory / NODE_KEY
    if not path.exists():
        _make_key(path)
    return read_key(path)


def rotate(config: Config) -> tuple[Key | None, Key]:
    """Make a new node key; the old one stays valid under another name. Return both. Raises Refused, OSError."""
    path = config.key_directory / NODE_KEY
    old = read_key(path) if path.exists() else None
    if old is not None:
        retired = path.with_name(f"retired-{old.id}{SUFFIX}")
        if not retired.exists():
            os.link(path, retired)  # before the new key takes the name: the old one is valid at every moment
        _make_key(path, replace=True)
        return Key(old.secret, retired), read_key(path)
    _make_key(path)
    return None, read_key(path)


def key_files(directory: Path) -> list[Path]:
    """Return the key files in the key directory, the node's current one first."""
    try:
        found = sorted(path for path in directory.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: path.name != NODE_KEY)


def read_key(path: Path, *, shared: bool = False) -> Key:
    """Read a key file that only root can read. Raises Refused."""
    text = read_secret_file(path, f"key {path}").decode("ascii", errors="replace").strip()
    return Key(_parsed(path, text), path, shared)


def read_secret_file(path: Path, name: str) -> bytes:
    """Return the content of a small regular file that no other user can read; errors call it `name`.

    Raises Refused, whose message never contains any of the content.
    """
    try:
        fd = open_plain(path)
    except NotPlain:
        raise Refused(f"{name} is not a regular file") from None
    except OSError as error:
        raise Refused(f"{name} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise Refused(
                f"{name} belongs to uid {status.st_uid} and has mode {status.st_mode & 0o7777:04o}; a key is root's own"
                " and 0600. Make a new one if another user may have read it; else"
                f" `chown root {path}; chmod 600 {path}`"
            )
        content = os.read(fd, MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > MOST_BYTES:
        raise Refused(f"{name} is longer than {MOST_BYTES} bytes")
    return content


def _parsed(path: Path, text: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise Refused(f"key {path} does not hold {KEY_BYTES} bytes in hexadecimal; `openssl rand -hex 32` makes one")
    return secret


def _make_key(path: Path, *, replace: bool = False) -> None:
    """Write a random key atomically; a concurrent writer's key is kept."""
    make_private(path.parent)
    replace_file(path, f"{os.urandom(KEY_BYTES).hex()}\n", durable=True, keep=not replace)


def _sha256_hex(content: bytes) -> str:
    from hashlib import sha256  # OpenSSL's import is not free, and most daemons never sign

    return sha256(content).hexdigest()
