"""Memory stays shared with the fork server, by what a lane's interpreter and C library do."""

from __future__ import annotations

import subprocess
import sys

import pytest

CONSTANTS = """
import dis
from kybernate_shim.fork_server.shared_pages import fix_constants

def pair():
    return ("one of two", 2.5)

fix_constants()
for _ in range(10):
    pair()
print(*(instruction.opname for instruction in dis.get_instructions(pair, adaptive=True)))
"""
GAPS = """
import ctypes
from kybernate_shim.fork_server.shared_pages import keep_shared

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_size_t
libc.free.argtypes = [ctypes.c_size_t]
places = [libc.malloc(size) for _ in range(1000)]
for place in places[::2]:
    libc.free(place)
keep_shared()
print(sum(libc.malloc(size) < max(places) for _ in range(100)))
"""


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_no_instruction_counts_references_to_a_constant() -> None:
    assert "LOAD_CONST_MORTAL" not in said(CONSTANTS)


@pytest.mark.parametrize("size", [24, 152, 504, 1000, 8192])
def test_what_is_allocated_later_lies_in_no_gap_between_what_is_shared(size: int) -> None:
    assert said(f"size = {size}" + GAPS) == "0\n"
