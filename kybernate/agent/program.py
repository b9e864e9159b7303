"""The node agent as a program: assembles its parts, runs until it is stopped, and leaves nothing half done.

What shims do continues when the agent ends, however that is; the next start finds it in the journal.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kybernate.agent.assembly import Agent
from kybernate.agent.lifetime import OnlyAgent
from kybernate.agent.notify import Notifier, forget, passed_sockets
from kybernate.agent.settings import DEFAULT_PATH, LiveSettings
from kybernate.logs import open_log
from kybernate.node.failure import Failure
from kybernate_shim import __version__
from kybernate_shim.errors import Refused
from kybernate_shim.linux.private_files import NO_OTHERS
from kybernate_shim.trust.places import make_private

ENDING: Final = (signal.SIGTERM, signal.SIGINT)


def run(path: Path = DEFAULT_PATH) -> None:
    """Run the agent until SIGTERM. Raises ConfigInvalid, and Failure where it cannot start or continue."""
    live = LiveSettings.load(path)
    given, notifier = passed_sockets(os.environ, os.getpid()), Notifier.of(os.environ, os.getpid())
    forget(os.environ)
    os.umask(NO_OTHERS)
    log = open_log(live.current.log_level)
    for warning in live.current.warnings:
        log.warning("settings.ignored", warning=warning)
    state = live.current.state_directory
    try:
        make_private(state)
        lock = OnlyAgent(state / "lock")
    except (OSError, Refused) as error:
        raise Failure(
            str(error), advice="name a directory of root's alone as `state_directory` in agent.toml"
        ) from error
    try:
        asyncio.run(_main(live, given, notifier, log))
    finally:
        lock.close()


async def _main(live: LiveSettings, given: Mapping[str, socket.socket], notifier: Notifier, log: Any) -> None:
    stopping, reloading = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, reloading.set)
    agent = Agent(live, log, given, notifier)
    parts = agent.parts
    try:
        await parts.start()
        parts.spawn(_reloads(agent, reloading, notifier))
        _freeze_what_is_loaded()
        notifier.send(READY="1", STATUS=f"serving on {live.current.socket}")
        log.info("agent.started", version=__version__, socket=live.current.socket)
        await parts.until(stopping)
    finally:
        notifier.send(STOPPING="1", STATUS="waiting for operations")
        await parts.drain(live.current.operations.drain)
        await parts.stop()
    log.info("agent.stopped")


def _freeze_what_is_loaded() -> None:
    """Spare later garbage collections what was imported: one over all of it stops the event loop for tens of ms."""
    gc.collect()
    gc.freeze()


async def _reloads(agent: Agent, wanted: asyncio.Event, notifier: Notifier) -> None:
    while True:
        await wanted.wait()
        wanted.clear()
        notifier.send(RELOADING="1", MONOTONIC_USEC=str(int(asyncio.get_running_loop().time() * 1e6)))
        await agent.reload()
        notifier.send(READY="1")
