"""The CUDA helper: one process per node that does the driver's checkpoint calls for every shim.

`python -m kybernate_shim.cuda_helper.helper --socket PATH`. It serves kybernate.cuda.v1.Cuda on a socket that only its
own user may use, does not load libcuda itself (see `workers`), and ends when no client has called for
`gpu.helper_idle` seconds: its workers hold the driver, which could not be updated while they live. A second helper on
the same socket ends immediately, with success. The helper also manages the node's arena, which outlives it.

The node's settings are read with each call, and every few seconds while the helper waits. Settings that are given on
the command line take precedence and do not change.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kybernate_shim.arena.banks import from_text
from kybernate_shim.arena.memory import FOLDER
from kybernate_shim.config import DEFAULT_PATH
from kybernate_shim.cuda_helper import workers as pool
from kybernate_shim.cuda_helper.holders import Holders
from kybernate_shim.cuda_helper.image_pool_manager import ImagePoolManager
from kybernate_shim.cuda_helper.service import CudaService, NodeSettings
from kybernate_shim.linux import huge_pages
from kybernate_shim.linux.locks import held, try_lock_file
from kybernate_shim.linux.private_files import NO_OTHERS, make_directory
from kybernate_shim.live_config import LiveConfig
from kybernate_shim.logs import LineWriter, Log
from kybernate_shim.ttrpc import Server

LOOK_SECONDS = 5.0
SET = "default: as the node's configuration says"


async def serve(path: Path, settings: NodeSettings, arena: Path, log: Any) -> None:
    """Serve on `path` until no client has called for long enough, or SIGTERM; `arena` is the arena's directory."""
    lifetime = pool.Lifetime(path.with_name(f"{path.name}.workers"))
    workers = pool.Workers(lifetime)
    holders = Holders(path.with_name("holders"), [sys.executable, *sys.orig_argv[1:]])
    service = CudaService(workers, holders, settings, arena, log)
    pool_manager = ImagePoolManager(log)
    server = Server(
        service.services(),
        on_error=lambda call, error: log.error("cuda.call_failed", method=call.method, error=repr(error)),
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start(_listen(path))
    service.take_over(lifetime)
    log.info("cuda.helper_started", socket=str(path), idle_seconds=settings.read().helper_idle)
    try:
        await _until_idle(service, pool_manager, stop)
    finally:
        path.unlink(missing_ok=True)  # first, so that no client connects to a listener that is about to close
        await server.close()
        await workers.close()
        await service.arena_manager.close()
        await pool_manager.close()
        log.info("cuda.helper_ended")


async def _until_idle(service: CudaService, pool_manager: ImagePoolManager, stop: asyncio.Event) -> None:
    """Wait until no client has called for the idle time; meanwhile, undo what killed shims have left switched on.

    Also make memory for images, a moment after the last call, so as not to delay the work that follows a call.
    """
    loop = asyncio.get_running_loop()
    while not stop.is_set():
        now = await service.look()
        huge_pages.restore_node()
        await service.arena_manager.tidy(loop.time())
        if not service.running and loop.time() - service.last_call >= LOOK_SECONDS:
            pool_manager.tidy(loop.time(), now.image_pool, now.image_pool_files)
        left = service.last_call + now.helper_idle - loop.time() if not service.busy else LOOK_SECONDS
        if left <= 0:
            return
        try:
            async with asyncio.timeout(min(left, LOOK_SECONDS)):
                await stop.wait()
        except TimeoutError:
            pass


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of a helper that was killed: we hold the lock, so none lives
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(128)
    return listener


def _claim(path: Path) -> AbstractContextManager[bool]:
    """Be the helper of the socket `path` for as long as the context lasts; yield False when there is one."""
    make_directory(path.parent)
    return held(try_lock_file(path.with_name(f"{path.name}.lock")))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kybernate-cuda-helper", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--socket", type=Path, required=True, help="where to listen")
    parser.add_argument(
        "--idle", type=float, metavar="SECONDS", help=f"seconds without a call after which it ends ({SET})"
    )
    parser.add_argument(
        "--arena",
        type=from_text,
        metavar="SIZES",
        help=f"bytes of the node's arena, or NODE:BYTES,… for each NUMA node ({SET})",
    )
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_PATH, metavar="FILE", help="the node's configuration file"
    )
    parser.add_argument(
        "--arena-folder", type=Path, default=FOLDER, metavar="PATH", help="where the arena's memory is mounted"
    )
    parser.add_argument(
        "--arena-share", type=float, metavar="SHARE", help=f"part of the arena that one pod may have, 0 to 1 ({SET})"
    )
    arguments = parser.parse_args(argv)
    os.umask(NO_OTHERS)  # of its workers as well: no container inherits it
    with _claim(arguments.socket) as ours:
        if not ours:
            return 0
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):  # the helper must see all GPUs of the node
            os.environ.pop(name, None)
        log = Log(LineWriter(sys.stderr.fileno()).write, logging.DEBUG, {})
        fixed = {
            "arena": arguments.arena,
            "arena_share": arguments.arena_share,
            "helper_idle": arguments.idle,
        }
        settings = NodeSettings(LiveConfig(log, arguments.config), fixed)
        asyncio.run(serve(arguments.socket, settings, arguments.arena_folder, log))
    return 0


if __name__ == "__main__":
    sys.exit(main())
