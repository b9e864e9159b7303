"""What of a process's mappings a driver has taken away: pure, on spans of addresses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux.ptrace.covers import Span, reserved_spans, shared_spans, taken_away

BEFORE = b"""\
200600000-200800000 rw-s 00000000 00:05 601                              /dev/nvidia0
200800000-204000000 rw-s 00000000 00:05 602                              /dev/nvidiactl
7f1b88ab2000-7f1b88ac2000 -w-s 00000000 00:05 601                        /dev/nvidia0
7f1b88b00000-7f1b88b01000 ---s 00000000 00:05 601                        /dev/nvidia0
7f1b88c03000-7f1b88c04000 r--s 00000000 00:05 602                        /dev/nvidiactl
7f1b89000000-7f1b89001000 rw-p 00000000 00:00 0 s
7f1b8a000000-7f1b8a001000 r--s 00000000 00:1f 77                         /tmp/a name\\012200000000-300000000 rw-s
"""
AFTER = b"""\
200600000-204000000 ---p 00000000 00:00 0\x20
7f1b88ab2000-7f1b88ac2000 ---p 00000000 00:00 0\x20
7f1b88c03000-7f1b88c04000 rw-s 00000000 00:00 5                          /dev/zero (deleted)
7f1b8a000000-7f1b8a001000 ---p 00000000 00:1f 77                         /tmp/library.so
7f1b8b000000-7f1b8b001000 ---p 00000000 00:00 0                          [anon: guard]
"""


def test_only_what_was_shared_and_accessible_and_is_reserved_now_was_taken_away() -> None:
    found = taken_away(shared_spans(BEFORE), reserved_spans(AFTER))
    assert found == [Span(0x200600000, 0x204000000), Span(0x7F1B88AB2000, 0x7F1B88AC2000)]


spans = st.lists(st.integers(0, 60), unique=True, max_size=16).map(
    lambda ends: [Span(*pair) for pair in zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False)]
)


def addresses(found: list[Span]) -> set[int]:
    return {address for span in found for address in range(span.start, span.end)}


@given(spans, spans)
def test_what_was_taken_away_is_what_both_have(before: list[Span], now: list[Span]) -> None:
    found = taken_away(before, now)
    assert addresses(found) == addresses(before) & addresses(now)
    assert found == sorted(found)
