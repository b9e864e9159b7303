"""This node's copy of a store's index: a SQLite file, which can be removed at any time and is made again.

A million chunks are some hundred MiB on the disk, and none of them is in memory.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kybernate.store.errors import ObjectMissing, StoreInvalid
from kybernate.store.format import index as indexes
from kybernate.store.format.pack import ENTRY, Place
from kybernate.store.keys import StoreKey
from kybernate.store.objects import Objects

# Names of chunks are random, so that each row is on another page: of a million, most pages should be in memory.
CACHE = "PRAGMA cache_size = -32768"
SETTINGS = f"PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; {CACHE}; PRAGMA temp.cache_size = -57344"
# While it sorts, SQLite takes as much for a run, and merges the runs. One that the CPU's cache does not hold
# costs more for each row.
SORT_CACHE = "PRAGMA cache_size = -4096"
SCHEMA = """
CREATE TABLE IF NOT EXISTS loaded (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pack (number INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL);
CREATE TABLE IF NOT EXISTS chunk (
    id BLOB NOT NULL, pack INTEGER NOT NULL, offset INTEGER NOT NULL, stored INTEGER NOT NULL, size INTEGER NOT NULL,
    codec INTEGER NOT NULL);
"""
BY_ID = "CREATE INDEX IF NOT EXISTS chunk_by_id ON chunk (id, pack)"
ROWS = "SELECT coalesce(max(rowid), 0) FROM chunk"
ADD = "INSERT INTO chunk (pack, id, offset, stored, size, codec) VALUES (?, ?, ?, ?, ?, ?)"
FIND = "SELECT name, offset, stored, size, codec FROM chunk JOIN pack ON pack = number WHERE id = ? ORDER BY name"
PARALLEL = 8
MANY = 4  # where more rows come than this part of those that are there, all are sorted again


class ChunkIndex:
    """Where chunks are. Any thread may use it; they take turns, because a connection is for one at a time."""

    def __init__(self, path: Path | str, key: StoreKey) -> None:
        self._key = key
        self._lock = threading.RLock()
        self.broken: dict[str, str] = {}  # indexes that cannot be read, and why
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.executescript(SETTINGS + ";" + SCHEMA + BY_ID)

    def close(self) -> None:
        self._database.close()

    async def refresh(self, objects: Objects) -> None:
        """Take over the indexes that are new in the store.

        Where one that was taken over is gone, a collection has merged it, and packs may be gone: all is read again.
        """
        found = sorted([stored async for stored in objects.list(indexes.PREFIX)], key=lambda one: one.modified)
        sizes = {stored.name: stored.size for stored in found}
        with self._lock:
            loaded = {name for (name,) in self._database.execute("SELECT name FROM loaded")}
        if loaded - sizes.keys():
            self.clear()
            loaded = set()
        new = [name for name in sizes if name not in loaded]
        with self._sorted_afterwards(sum(sizes[name] for name in new) // ENTRY.size):
            if await self._load(objects, new):
                return None
        return await self.refresh(objects)  # a collection has just replaced one

    async def _load(self, objects: Objects, new: Sequence[str]) -> bool:
        """Take over indexes; return False where one is gone."""
        for begin in range(0, len(new), PARALLEL):
            part = new[begin : begin + PARALLEL]
            reading = (objects.get(name, most=indexes.MOST_BYTES) for name in part)
            contents = await asyncio.gather(*reading, return_exceptions=True)
            for name, content in zip(part, contents, strict=True):
                if isinstance(content, ObjectMissing):
                    return False
                if isinstance(content, BaseException) and not isinstance(content, StoreInvalid):
                    raise content
                await asyncio.to_thread(self._take, name, content)
        return True

    @contextmanager
    def _sorted_afterwards(self, new: int) -> Iterator[None]:
        """Sort once, where many rows are new: to keep random names sorted costs more with each of them."""
        with self._lock:
            (rows,) = self._database.execute(ROWS).fetchone()
            if many := new > rows // MANY:
                self._database.execute("DROP INDEX IF EXISTS chunk_by_id")
        try:
            yield
        finally:
            if many:
                self._sort()

    def _sort(self) -> None:
        with self._lock:
            for statement in (SORT_CACHE, BY_ID, CACHE):
                self._database.execute(statement)

    def _take(self, name: str, content: bytes | StoreInvalid) -> None:
        """Take over an index. One that cannot be read adds nothing: its packs say what is in them."""
        try:
            if isinstance(content, StoreInvalid):
                raise content
            self.add(indexes.decode(self._key, content), loaded=name)
        except StoreInvalid as error:
            self.broken[name] = str(error)
            self.add([], loaded=name)

    def add(self, packs: Iterable[tuple[str, Sequence[Place]]], *, loaded: str = "") -> None:
        """Note where the chunks of packs are, of all packs or, where `packs` raises, of none."""
        with self._lock, self._database:
            self._database.execute("BEGIN")
            for pack, places in packs:
                added = self._database.execute("INSERT OR IGNORE INTO pack (name) VALUES (?)", (pack,))
                if not added.rowcount:
                    continue  # another index names it too, and a pack never changes
                self._database.executemany(ADD, [(added.lastrowid, *place) for place in places])
            if loaded:
                self._database.execute("INSERT OR REPLACE INTO loaded VALUES (?)", (loaded,))
            self._database.execute("COMMIT")

    def find(self, id: bytes, usable: Callable[[str], bool] = lambda pack: True) -> tuple[str, Place] | None:
        """Return a pack that holds a chunk, and the place in it.

        Of several that are `usable` it is the one whose name is first. So all collections agree which an image needs.
        """
        with self._lock:
            rows = self._database.execute(FIND, (id,)).fetchall()
        row = next((row for row in rows if usable(row[0])), None)
        return (row[0], Place(id, *row[1:])) if row else None

    def knows(self, pack: str) -> bool:
        """Return whether an index names a pack."""
        with self._lock:
            return self._database.execute("SELECT 1 FROM pack WHERE name = ?", (pack,)).fetchone() is not None

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self.broken.clear()
            self._database.executescript("BEGIN; DELETE FROM chunk; DELETE FROM pack; DELETE FROM loaded; COMMIT")

    def packs(self) -> frozenset[str]:
        """Return the packs that an index names."""
        with self._lock:
            return frozenset(name for (name,) in self._database.execute("SELECT name FROM pack"))

    def count(self) -> int:
        """Return the number of chunks."""
        with self._lock:
            (count,) = self._database.execute("SELECT count(*) FROM (SELECT 1 FROM chunk GROUP BY id)").fetchone()
        return int(count)

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Give the database to what queries it about many chunks (reach.py)."""
        with self._lock:
            yield self._database
