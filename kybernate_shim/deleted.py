"""What a daemon leaves in a bundle when it has deleted the container: the whole answer to the `delete` that follows.

containerd calls `delete` after each container, and nearly always nothing is left to do. fork_server/client.c gives this
answer, unless the daemon's socket is left.
"""

from __future__ import annotations

from pathlib import Path

from kybernate_shim.linux.atomic_write import replace_file

NAME = "deleted"


def leave_answer(bundle: Path, answer: bytes) -> None:
    """Record that the runtime has forgotten the container in `bundle` and that its rootfs is unmounted.

    `answer` is a serialised DeleteResponse. Raises OSError; `delete` then looks for itself.
    """
    replace_file(bundle / NAME, answer)
