"""References to images of an image registry: HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]. No default registry is assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kybernate.export.documents import DIGEST
from kybernate.node.failure import Invalid

HOST = re.compile(r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?")
REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}")
LONGEST = 255  # characters of host and repository together
LOCAL = re.compile(r"(?:localhost|127(?:\.[0-9]+){3}|\[::1\])(?::[0-9]+)?")


@dataclass(frozen=True)
class Reference:
    """An image of an image registry. `tag` or `digest` may be empty."""

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def target(self) -> str:
        """What the registry's paths end with: the digest, where it is known, or the tag."""
        return self.digest or self.tag

    @property
    def is_local(self) -> bool:
        """Whether the registry is on this machine, and needs no TLS."""
        return LOCAL.fullmatch(self.host) is not None

    def at(self, digest: str) -> Reference:
        """Return the reference with a digest."""
        return replace(self, digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.host}/{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"


def parsed(text: str, *, default_tag: str = "latest") -> Reference:
    """Parse a reference to an image. Raises Invalid."""
    name, at, digest = text.partition("@")
    host, slash, path = name.partition("/")
    repository, _, tag = path.partition(":")
    known = slash and HOST.fullmatch(host) and REPOSITORY.fullmatch(repository) and len(name) <= LONGEST + len(tag) + 1
    if not known or (":" in path and not TAG.fullmatch(tag)) or (at and not DIGEST.fullmatch(digest)):
        raise Invalid(
            f"{text!r} is not a reference to an image of an image registry",
            advice="write HOST[:PORT]/REPOSITORY:TAG, or HOST[:PORT]/REPOSITORY@sha256:…",
        )
    return Reference(host, repository, tag or ("" if digest else default_tag), digest)
