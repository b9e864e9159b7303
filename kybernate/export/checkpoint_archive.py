"""One image as a CRI checkpoint archive: the tar that `checkpointctl` reads, and that containerd's CRI restores."""

from __future__ import annotations

from pathlib import Path

from kybernate.export.entries import described, payload, rootfs_diff
from kybernate.export.oci_layout import new_file
from kybernate.export.tar_stream import archive_bytes, archived
from kybernate.node.failure import Failure
from kybernate.node.reading import OnProgress
from kybernate_shim.checkpoint.image.store import Image, require_space
from kybernate_shim.errors import NoRoom


def write_archive(image: Image, target: Path, progress: OnProgress = lambda done, total: None) -> int:
    """Write the archive to `target`, where nothing is yet, and return its bytes.

    Raises Failure, and what `progress` raises; nothing is left then.
    """
    entries = (*described(image), *payload(image), *rootfs_diff(image))
    total, done = archive_bytes(entries), 0
    try:
        require_space(target.parent, total, what="export")
        with new_file(target) as out:
            for piece in archived(entries):
                out.write(piece)
                done += len(piece)
                progress(done, total)
    except (OSError, NoRoom) as error:
        raise Failure(f"{image.path} cannot be exported to {target}: {error}", state="nothing is left") from error
    return total
