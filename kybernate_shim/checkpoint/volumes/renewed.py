"""Files of ConfigMaps, Secrets, tokens, /etc/hosts and the like that are open: a restore opens those of the new pod.

CRIU opens a file by its name, and only with the size and the mode that it had. The new pod's file of that name has its
own content, and in the volumes that the kubelet keeps up to date its real path has the time of the update in it. So
size and mode are taken out of the image, and the directory with the time becomes the kubelet's link to the latest one,
also where it is watched by inotify.
A file that an update has removed while it was open is the new pod's, too. Offsets stay: a read beyond the end of a
shorter file ends there. What is mapped cannot be replaced under a running process, and is refused.
Source: Kubernetes' pkg/volume/util/atomic_writer.go; CRIU's files-reg.c, `validate_file`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.criu.images import FILES, DumpedMount, entries
from kybernate_shim.checkpoint.criu.opened import FILES_FILE, REGULAR, REMAP_FILE, REMAPS, remaps, write_entries
from kybernate_shim.linux.kernel_text import each_line
from kybernate_shim.linux.process import title_of
from kybernate_shim.messages import criu_pb2 as criu

UPDATE: Final = rb"\.\.\d{4}(?:_\d\d){5}\.\d+"  # the directory of one update
LATEST: Final = b"..data"


def renew(directory: Path, mounts: Iterable[DumpedMount], destinations: Collection[str]) -> None:
    """Let the CRIU images in `directory` name the new pod's files in its mounts at `destinations`.

    Raises Damaged and OSError.
    """
    renewed = {mount.id: mount.destination for mount in mounts if mount.key and mount.destination in destinations}
    files = list(entries(directory / FILES_FILE, FILES, criu.File)) if renewed else []
    before = [file.SerializeToString() for file in files]
    numbers = {file.id for file in files if _renew(file, renewed)}
    if [file.SerializeToString() for file in files] != before:
        write_entries(directory / FILES_FILE, FILES, files)
    gone = list(remaps(directory)) if numbers else []
    kept = [remap for remap in gone if remap.file not in numbers]
    if kept != gone:
        write_entries(directory / REMAP_FILE, REMAPS, kept)


def _renew(file: criu.File, renewed: Mapping[int, str]) -> bool:
    """Change one entry, and return whether it is of a file in one of the mounts, which are given by their ids."""
    for watch in file.inotify.watches if file.HasField("inotify") else ():
        for destination in renewed.values() if watch.file.HasField("path") else ():
            watch.file.path = latest(watch.file.path, destination)
    if file.type != REGULAR or file.regular.mount not in renewed:
        return False
    file.regular.name = latest(file.regular.name, renewed[file.regular.mount])
    file.regular.ClearField("size")
    file.regular.ClearField("mode")
    return True


def latest(name: bytes, destination: str) -> bytes:
    """Return a file's name with the kubelet's link in the place of the update that it was in.

    CRIU writes names with or without a leading slash.
    """
    above = os.fsencode(destination.strip("/"))
    found = re.fullmatch(rb"(/?" + re.escape(above) + rb"/)" + UPDATE + rb"(/.*)?", name, re.DOTALL)
    return found[1] + LATEST + (found[2] or b"") if found else name


def mapped(pids: Sequence[int], destinations: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each process that has a file of such a mount mapped. What has ended has none."""
    for pid in pids if destinations else ():
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = (line.split(None, 5) for line in each_line(f"/proc/{pid}/maps"))
            names = (fields[5].removesuffix(" (deleted)") for fields in lines if len(fields) == 6)
            found = {name for name in names if any(f"{name}/".startswith(f"{place}/") for place in destinations)}
            for name in sorted(found):
                yield (
                    f"{title_of(pid)} has {name!a} mapped, whose content differs in every pod; a program that"
                    " reads it instead can be restored"
                )
