"""One agent for a node, and signs of life that depend on the journal."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from kybernate.agent.journal import Journal
from kybernate.agent.lifetime import OnlyAgent, Watchdog
from kybernate.agent.notify import Notifier
from kybernate.node.failure import Failure
from tests.unit.agent.access.conftest import Log, soon


def test_second_agent_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = OnlyAgent(tmp_path / "lock")
    with pytest.raises(Failure, match=str(tmp_path)):
        OnlyAgent(tmp_path / "lock")
    first.close()
    OnlyAgent(tmp_path / "lock").close()


def test_manager_hears_while_the_journal_works_and_not_after(tmp_path: Path) -> None:
    journal, log = Journal(tmp_path / "journal.db", ()), Log()

    async def main() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(tmp_path / "notify"))
            manager.setblocking(False)
            watchdog = Watchdog(Notifier(str(tmp_path / "notify"), 0.3), journal, log)
            running = asyncio.create_task(watchdog.run())
            loop = asyncio.get_running_loop()
            for _ in range(2):
                assert await asyncio.wait_for(loop.sock_recv(manager, 100), 10) == b"WATCHDOG=1"
            with journal.transaction():  # is stuck: the lock is never released
                await soon(lambda: any(event == "watchdog.missed" for _, event, _ in log.lines))
                heard(manager)  # what was sent before
                log.lines.clear()
                await soon(lambda: any(event == "watchdog.missed" for _, event, _ in log.lines))
                assert heard(manager) == []
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(main())


def heard(manager: socket.socket) -> list[bytes]:
    """Return all that has arrived."""
    found = []
    try:
        while True:
            found.append(manager.recv(100))
    except BlockingIOError:
        return found


def test_without_a_watchdog_no_signs_are_given(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db", ())
    asyncio.run(Watchdog(Notifier(str(tmp_path / "notify")), journal, Log()).run())
    journal.close()
