"""Credentials for image registries, from the file and the helpers that `docker login` and others write.

Source: Docker's manual, "docker login": `auths`, `credHelpers`, `credsStore`; docker-credential-helpers' protocol.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kybernate.node.failure import Failure
from kybernate_shim import bounded_json

HELPER = re.compile(r"[A-Za-z0-9._-]+")
HELPER_SECONDS = 30
MOST_FILE = 1 << 20
TOKEN_USER = "<token>"  # the user name by which a helper marks an identity token
NOT_FOUND = "credentials not found"  # a helper's words for a registry that it does not know


@dataclass(frozen=True)
class Credentials:
    """What a registry is given; all empty where it gets nothing. `identity` is an OAuth2 refresh token."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity: str = field(default="", repr=False)

    def __bool__(self) -> bool:
        return bool(self.user or self.identity)


def credentials_for(host: str, file: Path | None = None) -> Credentials:
    """Return the credentials for a registry. Raises Failure."""
    path = file or _default_file()
    document = _read(path, required=file is not None)
    helper = (_table(document, "credHelpers").get(host)) or document.get("credsStore")
    if helper and (found := _of_helper(str(helper), host)):
        return found
    return _stored(_table(document, "auths").get(host), path)


def _default_file() -> Path:
    directory = os.environ.get("DOCKER_CONFIG")
    return (Path(directory) if directory else Path.home() / ".docker") / "config.json"


def _read(path: Path, *, required: bool) -> Mapping[str, Any]:
    try:
        with path.open("rb") as stream:
            document = bounded_json.parse(stream.read(MOST_FILE))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise Failure(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be read: {error}", advice="`docker login` writes it") from error
    if not isinstance(document, dict):
        raise Failure(f"{path} is not a file of credentials", advice="`docker login` writes it")
    return document


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _stored(entry: Any, path: Path) -> Credentials:
    if not isinstance(entry, dict):
        return Credentials()
    if token := entry.get("identitytoken"):
        return Credentials(identity=str(token))
    try:
        plain = base64.b64decode(str(entry.get("auth") or ""), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise Failure(f"{path} has an entry `auth` that is not base64") from error
    user, _, password = plain.partition(":")
    return Credentials(str(entry.get("username") or user), str(entry.get("password") or password))


def _of_helper(name: str, host: str) -> Credentials:
    """Ask a credential helper; nothing is found where it does not know the registry."""
    program = f"docker-credential-{name}"
    if not HELPER.fullmatch(name):
        raise Failure(f"{name!r} is not the name of a credential helper")
    try:
        done = subprocess.run(
            [program, "get"], input=host, capture_output=True, text=True, timeout=HELPER_SECONDS, check=False
        )
        if done.returncode and NOT_FOUND in done.stdout + done.stderr:
            return Credentials()
        if done.returncode:
            raise Failure(f"{program} ended with {done.returncode}: {(done.stdout + done.stderr)[:400]}")
        found = bounded_json.parse(done.stdout)
        user, secret = str(found["Username"]), str(found["Secret"])
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise Failure(f"{program} cannot be used: {error}") from error
    return Credentials(identity=secret) if user == TOKEN_USER else Credentials(user, secret)
