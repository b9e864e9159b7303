"""Packs what a run has written into one archive that is small enough to be carried away."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 16 << 20  # of the archive
END_BYTES = 256 << 10  # of a file that does not fit, from its beginning and from its end
HEADER_BYTES = 2048  # of an archive for each file, at most
LEFT_OUT = "left-out.txt"


def pack(folder: Path, archive: Path, most: int = MOST_BYTES) -> list[str]:
    """Write the files below `folder` into a tar.gz of at most `most` bytes, and return a line for each thing done.

    Files that do not fit are cut to their beginning and their end, the largest first; left-out.txt in the archive
    names them.
    """
    contents = {path: path.read_bytes() for path in _files(folder, archive)}
    cut: list[str] = []
    for path in sorted(contents, key=lambda one: -len(contents[one])):
        if sum(map(_packed, contents.values())) <= most - HEADER_BYTES * (len(cut) + 2):
            break
        size = len(contents[path])
        contents[path] = _ends(contents[path])
        cut.append(f"{path.relative_to(folder)}: {len(contents[path])} of {size} bytes")
    if cut:
        contents[folder / LEFT_OUT] = "\n".join([*cut, ""]).encode()
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for path, content in contents.items():
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return [f"{archive}: {archive.stat().st_size} bytes, {len(contents)} files", *(f"cut: {line}" for line in cut)]


def _files(folder: Path, archive: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.absolute() != archive.absolute():
            yield path


def _packed(content: bytes) -> int:
    return len(zlib.compress(content, 6)) + HEADER_BYTES


def _ends(content: bytes) -> bytes:
    if len(content) <= 2 * END_BYTES:
        return content
    return content[:END_BYTES] + b"\n...\n" + content[-END_BYTES:]
