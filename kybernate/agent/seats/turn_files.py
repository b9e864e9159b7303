"""Shows programs whether it is the turn of their container's seat, by a file that their container can only read.

The library in them looks at it before it lets a program begin with CUDA (kybernate_shim/preload/turn.c): the driver can
lock only a process that has called it. A shim makes the file, empty: it is the container's turn. Else it has what a
program does while the agent is away. The agent has a lock on each file, which ends with it, and takes a read for a use.
Nothing is read here that a container could have written.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kybernate.agent.seats.claims import Key
from kybernate_shim.linux import inotify
from kybernate_shim.run_directory import TURNS, turn_file

BYTES: Final = 16  # what the library reads of it
WAIT_SECONDS: Final = 110  # for an agent that is away, as a start waits
MODE: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass
class _File:
    fd: int
    watch: int | None = None
    locked: bool = False
    shown: bool | None = None  # None: nothing yet by this run of the agent


class TurnFiles:
    """The files of the containers with seats. `waits`: their programs wait for an agent that is away.

    All of its methods are for the event loop: a file is in memory, and takes some microseconds.
    """

    def __init__(self, folder: Path = TURNS, *, waits: bool = True) -> None:
        self.waits = waits
        self._folder = folder
        self._files: dict[Key, _File] = {}
        self._watched: dict[int, Key] = {}
        self._awaited: set[Key] = set()
        self._inotify: int | None = None
        self._is_first = True

    def show(self, turns: Mapping[Key, bool]) -> None:
        """Show containers with seats whether it is their turn. What has no seat, or no library, is passed over."""
        if self._is_first:
            self._is_first = False
            self._open_others(turns)
        for key in self._files.keys() - turns.keys():
            self._drop(key)
        self._drain()
        for key, is_turn in turns.items():
            with suppress(OSError):  # a container that is gone, or no room for a watch: the next turn tries again
                self._show(key, is_turn)

    def is_awaited(self, key: Key) -> bool:
        """Return whether a program waits for its container's turn; until that comes, or is settled."""
        self._drain()
        return key in self._awaited

    def settle(self, key: Key) -> None:
        """Take those that wait now for no use: their container was put to sleep on request."""
        self._drain()
        self._awaited.discard(key)

    def close(self) -> None:
        """Leave all files as they are, to a next agent."""
        for key in tuple(self._files):
            self._drop(key)
        if self._inotify is not None:
            os.close(self._inotify)
            self._inotify = None

    def _show(self, key: Key, is_turn: bool) -> None:
        file = self._file(key)
        if file is None:
            return
        if file.watch is None:
            file.watch, file.shown = self._watch(file.fd), None  # what was read before is read again
            self._watched[file.watch] = key
        if not file.locked:
            fcntl.lockf(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.locked = True
        if file.shown is not is_turn:
            file.shown = is_turn
            self._write(file.fd, is_turn)
        if is_turn:
            self._awaited.discard(key)

    def _write(self, fd: int, is_turn: bool) -> None:
        if is_turn:
            os.ftruncate(fd, 0)
        else:
            text = f"wait {WAIT_SECONDS}" if self.waits else "start"
            os.pwrite(fd, f"{text:<{BYTES - 1}}\n".encode(), 0)

    def _file(self, key: Key) -> _File | None:
        known = self._files.get(key)
        if known is not None and os.fstat(known.fd).st_nlink:
            return known
        if known is not None:
            self._drop(key)  # another container has its name now
        try:
            self._files[key] = _File(os.open(turn_file(*key, self._folder), MODE))
        except FileNotFoundError:
            return None
        return self._files[key]

    def _watch(self, fd: int) -> int:
        if self._inotify is None:
            self._inotify = inotify.instance()
        return inotify.watch(self._inotify, f"/proc/self/fd/{fd}", inotify.IN_ACCESS)

    def _drain(self) -> None:
        if self._inotify is None:
            return
        for watch in inotify.happened(self._inotify):
            key = self._watched.get(watch)
            if key is not None and self._files[key].shown is False:
                self._awaited.add(key)
            elif watch == inotify.LOST:
                self._ask_again()

    def _ask_again(self) -> None:
        """Have all that wait read their files again."""
        for file in self._files.values():
            if file.shown is False:
                self._write(file.fd, False)

    def _drop(self, key: Key) -> None:
        self._awaited.discard(key)
        file = self._files.pop(key)
        if file.watch is not None and self._inotify is not None:
            inotify.unwatch(self._inotify, file.watch)
            del self._watched[file.watch]
        os.close(file.fd)  # and with it the lock

    def _open_others(self, turns: Mapping[Key, bool]) -> None:
        """Let containers pass that had a seat, and have none by the present configuration."""
        for path in self._folder.glob("*/*"):
            if (path.parent.name, path.name) not in turns:
                with suppress(OSError):
                    os.truncate(path, 0)
