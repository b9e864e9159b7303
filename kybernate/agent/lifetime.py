"""One agent for a node, and signs of life for the service manager while event loop and journal work."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import Any, Final

from kybernate.agent.journal import Journal, JournalUnusable
from kybernate.agent.notify import Notifier
from kybernate.node.failure import Failure
from kybernate_shim.linux.locks import try_lock_file

SIGNS: Final = 3  # in the time that the manager waits for one


class OnlyAgent:
    """A lock that the kernel releases when the agent ends, however that is."""

    def __init__(self, path: Path) -> None:
        """Raises Failure and OSError."""
        fd = try_lock_file(path)
        if fd is None:
            raise Failure(
                f"another agent already uses {path.parent}", advice="`systemctl status kybernate-agent` shows it"
            )
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


class Watchdog:
    """Shows the manager that the agent lives: each sign needs the event loop, and a transaction of the journal.

    Without signs, the manager ends the agent and starts it again; operations of shims continue.
    """

    def __init__(self, notifier: Notifier, journal: Journal, log: Any) -> None:
        self._notifier, self._journal, self._log = notifier, journal, log

    async def run(self) -> None:
        """Give signs until this is cancelled; return immediately where the manager wants none."""
        if not self._notifier.watchdog:
            return
        pause = self._notifier.watchdog / SIGNS
        while True:
            try:
                async with asyncio.timeout(self._notifier.watchdog):
                    await self._journal.run(_touch)
            except (TimeoutError, JournalUnusable) as error:
                self._log.error("watchdog.missed", error=str(error) or "the journal does not answer")
            else:
                self._notifier.send(WATCHDOG="1")
            await asyncio.sleep(pause)


def _touch(connection: sqlite3.Connection) -> None:
    """Read from the journal, in a transaction that could write."""
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
