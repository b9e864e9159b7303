"""The screenshots of the manual: which there are, and by which page each was made.

A screenshot has the digest of the templates, styles and scripts of its page in a chunk of text: a test compares these,
and no pixels.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
MADE: Final = REPOSITORY / "build/screenshots"  # by the test; `make docs` takes them from there
SHOWN: Final = REPOSITORY / "docs"
KEYWORD: Final = b"kybernate-page"
SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Screenshot:
    """A file of the manual, and what is on it."""

    file: str
    path: str
    width: int
    height: int
    scheme: str = "light"
    state: str = ""  # a file of this folder: a moment of a recording of a real node; "" shows a scripted one
    settled: str = "9.00 GiB of 24.0 GiB"  # what its operations say once all is there


ALL: Final = (
    Screenshot("page-overview.png", "/", 1100, 1000),
    Screenshot("page-container.png", "/container?container=k8s.io/b", 1100, 760, "dark"),
    Screenshot("page-telephone.png", "/", 380, 760),
    Screenshot("page-gpu.png", "/", 1100, 1100, state="gpu_run.jsonl", settled="model-"),
)


def page_digest(page: Path = REPOSITORY / "kybernate/page") -> str:
    """Return what changes with the looks of the page."""
    digest = hashlib.sha256()
    for file in sorted([*page.glob("templates/**/*.html"), *page.glob("static/*")]):
        digest.update(f"{file.relative_to(page)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def marked(png: bytes, digest: str) -> bytes:
    """Return a PNG with the digest of its page, before its first pixels."""
    place = len(SIGNATURE) + 8 + 13 + 4  # IHDR is the first chunk, and has 13 bytes
    text = b"tEXt" + KEYWORD + b"\0" + digest.encode()
    return png[:place] + struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text)) + png[place:]


def made_by(png: bytes) -> str:
    """Return the digest of the page that a PNG was made with, "" where it has none."""
    texts = (data for kind, data in _chunks(png) if kind == b"tEXt" and data.startswith(KEYWORD + b"\0"))
    return next((data.partition(b"\0")[2].decode() for data in texts), "")


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(SIGNATURE)
    while place + 8 <= len(png):
        (size,) = struct.unpack_from(">I", png, place)
        yield png[place + 4 : place + 8], png[place + 8 : place + 8 + size]
        place += size + 12


def take_over() -> list[str]:
    """Copy into the manual what the test has made with the page as it is; return the names."""
    taken = []
    for one in ALL:
        made = MADE / one.file
        if made.exists() and made_by(made.read_bytes()) == page_digest() != made_by_file(SHOWN / one.file):
            (SHOWN / one.file).write_bytes(made.read_bytes())
            taken.append(one.file)
    return taken


def made_by_file(path: Path) -> str:
    """Return the digest of the page that a file was made with, "" where there is no such file."""
    return made_by(path.read_bytes()) if path.exists() else ""


if __name__ == "__main__":
    print("\n".join(take_over()))
