"""The notes of collections: which packs are condemned, and which writers may still rely on them.

A pack that was noted stays noted until it is gone: no writer and no collection relies on it from then on. So it does
not matter when a collection that has decided to delete it does so.

A note is written twice. Writers that began before the first time may not have read it; they are listed after it, and
are in the note the second time. A collection that died in between left a note without them, which the next completes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kybernate.store import lease
from kybernate.store.errors import ObjectMissing, StoreInvalid
from kybernate.store.format.documents import parse
from kybernate.store.objects import Objects, Stored

PREFIX = "condemned"
MOST_BYTES = 64 << 20  # of a note: a million packs
MOST_VALUES = 2 << 20


@dataclass(frozen=True)
class Note:
    """Packs that were found unreachable. `writers` are those who may not know, None where they were not listed.

    `problem` says why a note cannot be read: any pack may be in it.
    """

    name: str
    packs: frozenset[str]
    writers: frozenset[str] | None
    modified: float
    problem: str = ""


async def read(objects: Objects) -> tuple[Note, ...]:
    """Return the notes, as they were at one moment: of a list of several pages, parts may be older than others."""
    before, found = None, await _listed(objects)
    while before is None or {one.name for one in before} != {one.name for one in found}:
        before, found = found, await _listed(objects)
    return tuple([note for stored in found if (note := await _note(objects, stored)) is not None])


async def condemn(objects: Objects, packs: Iterable[str]) -> None:
    """Note packs."""
    if wanted := frozenset(packs):
        note = Note(f"{PREFIX}/{uuid.uuid4()}", wanted, None, 0.0)
        await _write(objects, note)
        await complete(objects, [note])


async def complete(objects: Objects, notes: Iterable[Note]) -> None:
    """Write who may not know of notes into those that lack it."""
    if lacking := [note for note in notes if note.writers is None and not note.problem]:
        writers = await lease.present(objects)
        for note in lacking:
            await _write(objects, Note(note.name, note.packs, writers, 0.0))


def problems(notes: Iterable[Note]) -> list[str]:
    """Return what is wrong with notes that cannot be read, a sentence each."""
    return [note.problem for note in notes if note.problem]


def condemned(notes: Iterable[Note]) -> Mapping[str, float]:
    """Return the noted packs, with when each was noted, in the service's time."""
    found: dict[str, float] = {}
    for note in notes:
        for pack in note.packs:
            found[pack] = min(note.modified, found.get(pack, note.modified))
    return found


def held(notes: Iterable[Note], living: Iterable[str]) -> frozenset[str]:
    """Return the noted packs that living writers may rely on."""
    writers, free = frozenset(living), set[str]()
    known = [note for note in notes if note.writers is not None and not note.writers & writers]
    for note in known:
        free |= note.packs
    return frozenset(pack for note in notes for pack in note.packs - free)


async def _listed(objects: Objects) -> list[Stored]:
    return [stored async for stored in objects.list(PREFIX)]


async def _note(objects: Objects, stored: Stored) -> Note | None:
    try:
        content = await objects.get(stored.name, most=MOST_BYTES)
        document = parse(stored.name, content, most_values=MOST_VALUES)
        writers = document["writers"]
        packs = frozenset(map(str, document["packs"]))
        known = None if writers is None else frozenset(map(str, writers))
    except ObjectMissing:
        return None  # its packs are gone
    except StoreInvalid as error:
        return Note(stored.name, frozenset(), None, stored.modified, str(error))
    except (KeyError, TypeError, RecursionError) as error:
        problem = f"{stored.name} cannot be read: {type(error).__name__}: {error}"
        return Note(stored.name, frozenset(), None, stored.modified, problem)
    return Note(stored.name, packs, known, stored.modified)


async def _write(objects: Objects, note: Note) -> None:
    writers = None if note.writers is None else sorted(note.writers)
    await objects.put(note.name, json.dumps({"packs": sorted(note.packs), "writers": writers}).encode())
