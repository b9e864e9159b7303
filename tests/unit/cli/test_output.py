"""Sizes, durations and columns."""

from __future__ import annotations

import pytest

from kybernate.cli.output import seconds, show_columns, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 << 10, "1.50 MiB"),
        (500 << 20, "500.0 MiB"),
        (80 << 30, "80.0 GiB"),
        (3 << 40, "3.00 TiB"),
    ],
)
def test_size_is_in_binary_units(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 ms"), (0.0874, "87 ms"), (0.9996, "1.00 s"), (1.316, "1.32 s"), (245.4, "4 min 05 s")]
)
def test_duration_is_readable(value: float, text: str) -> None:
    assert seconds(value) == text


def test_columns_are_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    show_columns(("NAME", "PID"), [("x" * 300, 1), ("y", "")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"NAME{' ' * 296}   PID", f"{'x' * 300}   1", "y"]
