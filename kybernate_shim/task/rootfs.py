"""The root filesystem of a container: mounted at Create unless containerd has done it, unmounted at Delete."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kybernate_shim.linux.children import Children
from kybernate_shim.linux.mount.rootfs import Mount, kept_overlay, mount_rootfs, unmount_tree


class Rootfs:
    """The mounts of one container on its rootfs directory; `mounts` are those that containerd requests there."""

    def __init__(self, directory: Path, children: Children) -> None:
        self.mounts: list[Mount] = []
        self._directory = directory
        self._children = children

    async def mount(self) -> None:
        """Make the mounts. Raises MountFailed; what has been mounted by then stays, for `unmount`."""
        run = partial(self._run_helper, asyncio.get_running_loop())
        await asyncio.to_thread(mount_rootfs, self.mounts, self._directory, run=run)

    async def unmount(self) -> None:
        """Undo that, with everything below it. Raises MountFailed.

        With its last mount, the kernel writes out the whole filesystem in which an overlay has its upper directory:
        what any container of the node has written there. This does not wait for that.
        """
        kept = await asyncio.to_thread(kept_overlay, self._directory)
        try:
            await asyncio.to_thread(unmount_tree, self._directory)
        finally:
            if kept is not None:
                threading.Thread(target=_release, args=(kept,), name="apart", daemon=True).start()

    def _run_helper(self, loop: asyncio.AbstractEventLoop, argv: Sequence[str]) -> None:
        """Run a mount helper for a thread: children belong to the event loop. Raises OSError when it fails."""
        done = asyncio.run_coroutine_threadsafe(self._children.run(argv), loop).result()
        if done.status:
            raise OSError(errno.EIO, f"{argv[0]} ended with status {done.status}: {done.stderr.strip()}")


def _release(filesystem: int) -> None:
    """Release a filesystem, which may be written out before this returns."""
    os.close(filesystem)
