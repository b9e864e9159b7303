"""The speed of a connection by what is sent over it, and the level of compression that suits it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kybernate.store.writer import MIB, Link, level_for


@pytest.mark.parametrize(
    ("mib_per_second", "threads", "level"), [(0, 2, 3), (1, 2, 6), (30, 2, 6), (100, 2, 3), (1000, 2, 1), (100, 8, 6)]
)
def test_level_is_the_one_that_keeps_the_connection_busy(mib_per_second: int, threads: int, level: int) -> None:
    assert level_for(mib_per_second * MIB, threads) == level


def test_requests_in_parallel_share_their_time() -> None:
    now = 0.0
    link = Link(lambda: now)
    assert link.bytes_per_second == 0
    with link.sending(100):
        now = 5.0
        with link.sending(100):
            now = 10.0
        assert link.bytes_per_second == 10
    assert link.bytes_per_second == 20
    now = 1000.0  # nothing is on its way
    assert link.bytes_per_second == 20


def test_failed_request_counts_for_its_time_alone() -> None:
    now = 0.0
    link = Link(lambda: now)
    with link.sending(100):
        now = 10.0
    with suppress(OSError), link.sending(100):
        now = 20.0
        raise OSError
    assert link.bytes_per_second == 5
