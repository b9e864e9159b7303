"""A journal that earlier code has written is read by this one: earlier_journal.sql has each verb and each state."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.agent.journal import Journal
from kybernate.agent.operations.store import SCHEMA, Store, Wanted
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.copy import Copy
from kybernate.verbs.delete import Delete
from kybernate.verbs.every import VERBS
from kybernate.verbs.evict import Evict
from kybernate.verbs.export import Export
from kybernate.verbs.importing import Import
from kybernate.verbs.model import Fault, Result, State, Step, Submission
from kybernate.verbs.restore import Restore
from kybernate.verbs.resume import Resume
from kybernate.verbs.suspend import Suspend
from kybernate.verbs.swap import Swap
from kybernate.verbs.verb import Verb
from kybernate.verbs.verify import Verify

RECORDED = Path(__file__).with_name("earlier_journal.sql")
ASKED: list[Verb] = [
    Checkpoint("shop/front", "k8s.io", "first", exit=True, tcp="close", without_rootfs=True, force=True, hold=True,
               hold_timeout=3.5, volumes="data", max_freeze=1.5),
    Restore("first", name="new", namespace="k8s.io", container_image="busybox:1", runtime="r", snapshotter="native",
            log_path="/log", force=True, from_store=True),
    Suspend("c1", "k8s.io", 1.5),
    Resume("c1", "k8s.io", 2.0, 3.0),
    Swap("c1", "c2", "k8s.io", 4.0),
    Verify("first"),
    Delete("first", True),
    Import("/a.tar", "second", "shop"),
    Export("first", "/b.tar"),
    Copy("first", "ram", "prefetch", True),
    Evict("first", "ram"),
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with sqlite3.connect(tmp_path / "journal.db") as connection:
        connection.executescript(RECORDED.read_text())
    connection.close()
    journal = Journal(tmp_path / "journal.db", SCHEMA)
    yield Store(journal, VERBS)
    journal.close()


def test_operations_of_all_verbs_and_states_are_read(store: Store) -> None:
    found = list(reversed(asyncio.run(store.list(Wanted()))))
    assert [one.arguments for one in found] == ASKED
    assert [one.state for one in found] == [*State, *State][: len(ASKED)]
    assert (found[1].target.ref, found[1].boot, found[1].attempts) == (("shop", "first", "id1"), "boot 1", 1)
    step = Step("restore", 0.5, 7, 1)
    assert found[3].result == Result(
        path="/images/first", image_id="id1", bytes=7, vram_bytes=9, arena_reasons=("full",), steps=(step,)
    )
    assert (found[4].fault, found[4].notes) == (
        Fault("NotSwapped", "it failed", "c1 runs", "try again"), ("it was begun again",),
    )  # fmt: skip
    assert len(asyncio.run(store.unfinished())) == 6


def test_keys_of_the_earlier_release_still_mean_the_same_requests(store: Store) -> None:
    for number, asked in enumerate(ASKED):
        again = Submission(asked, key=f"key {number}", seconds=60.0, labels={"team": "a"})
        known = asyncio.run(store.find_key(again))
        assert known is not None
        assert known.arguments == asked
