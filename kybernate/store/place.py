"""Where a store is, and how it is reached: a URL, the service's options, and the key."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kybernate.store.answers import scheme_of
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import StoreInvalid
from kybernate.store.keys import read_key
from kybernate.store.objects import RemoteObjects

if TYPE_CHECKING:
    from obstore.store import ObjectStore

DEFAULT_KEY = Path("/var/lib/kybernate/store/key")  # not among the keys that verify images
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")
MOST_CERTIFICATES = 16 << 20
TEMPORARY = ""  # a file that SQLite makes in TMPDIR or /var/tmp, and that is gone with the process
TIMEOUT, CONNECT_TIMEOUT = "60s", "10s"
RETRIES = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}  # of one request


@dataclass(frozen=True)
class StorePlace:
    """A store's place. `url` is s3://BUCKET/PREFIX, gs://…, az://… or file:///DIRECTORY.

    `ca` is a file with the certificates, in PEM, of authorities that are trusted besides the system's.
    `endpoint` is the URL of a service other than the provider's own. Credentials come from `options` (names as obstore
    has them, such as access_key_id), or from the environment and the instance, as the provider's tools take them.
    """

    url: str
    key: Path = DEFAULT_KEY
    encrypted: bool = False
    endpoint: str = ""
    region: str = ""
    ca: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def open_store(place: StorePlace, index: Path | str = TEMPORARY) -> ChunkStore:
    """Return the store at a place, not yet checked; see ChunkStore.open. Raises StoreInvalid."""
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    scheme = scheme_of(place.url)
    if scheme not in SCHEMES:
        raise StoreInvalid(f"{place.url!r} is not the URL of a store", advice=f"use one of {', '.join(SCHEMES)}://…")
    ca = _certificates(place.ca) if place.ca else None

    def opened(**options: str) -> ObjectStore:
        try:
            return from_url(place.url, **_arguments(place, scheme, ca, options))
        except (BaseError, OSError, ValueError, TypeError) as error:
            raise StoreInvalid(f"{place.url} cannot be opened: {str(error).partition(chr(10))[0]}") from error

    singly = (lambda: opened(disable_bulk_delete="true")) if scheme.startswith("s3") else None
    objects = RemoteObjects(opened(), title=place.url, singly=singly, ca=ca, ordered=scheme != "file")
    return ChunkStore(objects, read_key(place.key, encrypted=place.encrypted), index)


def _certificates(path: Path) -> bytes:
    """Return the certificates in a file. Raises StoreInvalid where it has none."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_CERTIFICATES)
        ssl.create_default_context().load_verify_locations(cadata=content.decode("ascii"))
    except (OSError, ValueError, ssl.SSLError) as error:
        raise StoreInvalid(f"{path} has no certificates in PEM: {error}", advice="correct `store.ca`") from error
    return content


def _arguments(place: StorePlace, scheme: str, ca: bytes | None, options: Mapping[str, str]) -> dict[str, Any]:
    if scheme == "file":
        return {"mkdir": True}
    options = {**place.options, **options}
    if place.endpoint:
        options["endpoint"] = place.endpoint
    if place.region:
        options["region"] = place.region
    if scheme.startswith("s3"):
        # The content of packs has a digest of its own: SHA-256 of each request would only cost time.
        options.setdefault("unsigned_payload", "true")
        options.setdefault("region", "us-east-1")
    plain = place.endpoint.startswith("http:")
    client: dict[str, Any] = {"timeout": TIMEOUT, "connect_timeout": CONNECT_TIMEOUT}
    client |= ({"allow_http": True} if plain else {}) | ({"root_certificate": ca} if ca else {})
    return {"config": options, "client_options": client, "retry_config": RETRIES}
