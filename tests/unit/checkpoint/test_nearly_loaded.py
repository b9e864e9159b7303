"""When the driver's restore begins while an image is still loaded: pure, on bytes and seconds."""

from __future__ import annotations

import pytest

from kybernate_shim.checkpoint.gpu.arena import RESTORE_SECONDS, nearly

GIB = 1 << 30


@pytest.mark.parametrize(
    ("filled", "seconds", "expected"),
    [
        (0, 10.0, False),  # nothing has come, which says nothing
        (8 * GIB, 0.6, False),  # as much again takes 0.6 s
        (9 * GIB, 0.6, True),
        (15 * GIB, 30.0, False),  # from afar: the last GiB takes two seconds
        (16 * GIB, 3000.0, True),
    ],
)
def test_driver_begins_when_the_rest_takes_no_longer_than_it(filled: int, seconds: float, expected: bool) -> None:
    assert RESTORE_SECONDS == 0.5
    assert nearly(filled, 16 * GIB, seconds) is expected
