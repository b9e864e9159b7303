"""Which layers of an image a directory holds whole: a pull that was killed continues after them.

One line of JSON for each layer, after one that names the boot: what was written before a power failure need not be on
the disk. A line that was written half ends the file. The directory is root's own, and the image is compared with its
manifest at the end all the same.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim import bounded_json
from kybernate_shim.linux.process import boot_id

NAME = ".kybernate-layers"


@dataclass(frozen=True)
class WholeLayer:
    """The files of an unpacked layer, and the image's manifest where it held that."""

    files: tuple[str, ...]
    manifest: bytes = b""


class LayerRecord:
    """The record of one directory. What lies there and is in no line is removed."""

    def __init__(self, directory: Path) -> None:
        """Read the record, or begin one. Raises OSError."""
        self._path = directory / NAME
        self._layers: dict[str, WholeLayer] = {}
        first = json.dumps({"boot": boot_id()})
        lines = self._path.read_text().split("\n") if self._path.exists() else []
        if lines[:1] == [first]:
            self._read(lines[1:-1])  # the last one has no end
        self._path.write_text("".join(f"{line}\n" for line in [first, *map(_line, self._layers.items())]))
        kept = {NAME, *(name for layer in self._layers.values() for name in layer.files)}
        for path in directory.iterdir():
            if path.name not in kept:
                path.unlink()

    def get(self, digest: str) -> WholeLayer | None:
        """Return what is there of a layer, None where it is not whole."""
        return self._layers.get(digest)

    def add(self, digest: str, files: Iterable[str], manifest: bytes) -> None:
        """Note that a layer was unpacked and compared with its digest. Raises OSError."""
        self._layers[digest] = WholeLayer(tuple(files), manifest)
        with self._path.open("a") as stream:
            stream.write(f"{_line((digest, self._layers[digest]))}\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                known = bounded_json.parse(line)
                manifest = base64.b64decode(known["manifest"])
                self._layers[known["layer"]] = WholeLayer(tuple(known["files"]), manifest)
            except (ValueError, LookupError, TypeError):
                return


def _line(layer: tuple[str, WholeLayer]) -> str:
    digest, whole = layer
    manifest = base64.b64encode(whole.manifest).decode()
    return json.dumps({"layer": digest, "files": list(whole.files), "manifest": manifest})
