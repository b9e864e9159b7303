"""Keeps the pages of forked processes shared with the server, for each page that one writes is copied for it.

An interpreter writes to every object that it so much as looks at, because it counts references there. Objects that are
made immortal are not counted (PEP 683, which was made for servers that fork); those that are frozen are no garbage
collector's business. What is loaded before the first fork lives as long as the server anyway.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from types import CodeType

# Of the count's lower half, which is at the beginning of every object, those values that are never counted up, by
# version of CPython. All of them take for immortal, and never count down, what has the highest bit set. From 3.14 on,
# many are not counted up, so ours is in their middle: extensions for older versions count in pairs, or nearly so.
IMMORTAL_BIT = 1 << 31
SATURATED = {(3, 12): 0xFFFFFFFF, (3, 13): 0xFFFFFFFF, (3, 14): 0xE0000000}


def keep_shared() -> None:
    """Let processes that are forked from now on copy as little as possible. Takes a quarter of a second."""
    gc.unfreeze()  # or what the first server has frozen would be overlooked
    gc.collect()
    if counts_can_be_fixed():
        _make_immortal(gc.get_objects())
    gc.freeze()


def counts_can_be_fixed() -> bool:
    """Tell whether this is an interpreter whose counts we know; None, immortal by itself, must look as expected."""
    return (
        sys.implementation.name == "cpython"
        and sys.version_info[:2] in SATURATED
        and sys.byteorder == "little"
        and sys.maxsize > 1 << 32
        and getattr(sys, "_is_gil_enabled", lambda: True)()
        and _count(None).value >= IMMORTAL_BIT
    )


def _make_immortal(objects: list[object]) -> None:
    """Fix the counts of `objects` and of all that they refer to. The mark is the count itself: no table is needed."""
    immortal = SATURATED[sys.version_info[:2]]
    while objects:
        thing = objects.pop()
        count = _count(thing)
        if count.value >= IMMORTAL_BIT:
            continue
        count.value = immortal
        objects += gc.get_referents(thing)
        if isinstance(thing, CodeType):  # no container to the collector
            objects += (thing.co_name, thing.co_qualname, thing.co_names, *thing.co_consts)


def _count(thing: object) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(id(thing))
