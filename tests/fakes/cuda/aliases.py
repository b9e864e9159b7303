#!/usr/bin/env python3
"""Map one piece of memory at several addresses that adjoin, and tell what calls on them answer.

Asked on the standard input, a line each, and answered by a line:
    write ALIAS VALUE   fills the memory, seen at an address
    content             reports the value at each address, and that of a copy over all of them
    cut, unmap          unmaps a part of a mapping, or all of them by one call; reports the code
    call                has each call made in a thread of its own
    answers             reports which have returned by now, as NAME=CODE, ...
Started by `python -m tests.fakes.cuda.aliases`. A test workload.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

from tests.fakes.cuda.zoo.structures import MEMORY_TYPE, Access, Location, Wanted
from tests.fakes.cuda.zoo.visit import GRAIN, NONE, READ_WRITE, Driver

SIZE, ALIASES = 2 * GRAIN, 3
ALL = SIZE * ALIASES


class Aliases:
    def __init__(self) -> None:
        self._driver = Driver()
        self._answers: dict[str, int] = {}
        handle, start = c_uint64(), c_uint64()
        call = self._driver.call
        call("cuMemCreate", ctypes.byref(handle), c_size_t(SIZE), ctypes.byref(Wanted(1, 1, Location(1, 0))), NONE)
        call("cuMemAddressReserve", ctypes.byref(start), c_size_t(ALL), c_size_t(), NONE, NONE)
        self._start = start.value
        for alias in range(ALIASES):
            call("cuMemMap", self._at(alias), c_size_t(SIZE), c_size_t(), handle, NONE)
        access = Access(Location(1, 0), READ_WRITE)
        call("cuMemSetAccess", start, c_size_t(ALL), ctypes.byref(access), c_size_t(1))

    def _at(self, alias: int) -> c_uint64:
        return c_uint64(self._start + alias * SIZE)

    def write(self, alias: str, value: str) -> str:
        self._driver.call("cuMemsetD8", self._at(int(alias)), c_ubyte(int(value)), c_size_t(SIZE))
        return "written"

    def content(self) -> str:
        copy, all_of_it = ctypes.create_string_buffer(SIZE), ctypes.create_string_buffer(ALL)
        values = set()
        for alias in range(ALIASES):
            self._driver.call("cuMemcpyDtoH", copy, self._at(alias), c_size_t(SIZE))
            values |= set(copy.raw)
        self._driver.call("cuMemcpyDtoH", all_of_it, self._at(0), c_size_t(ALL))
        return " ".join(map(str, values | set(all_of_it.raw)))

    def cut(self) -> str:
        return str(self._driver.code("cuMemUnmap", self._at(0), c_size_t(SIZE + GRAIN)))

    def unmap(self) -> str:
        return str(self._driver.code("cuMemUnmap", self._at(0), c_size_t(ALL)))

    def call(self) -> str:
        at, size, there = self._at(0), c_size_t(GRAIN), self._at(1)
        calls = {
            "cuMemcpyHtoD": (at, bytes(GRAIN), size),
            "cuMemcpyDtoHAsync": (ctypes.create_string_buffer(GRAIN), at, size, c_void_p()),
            "cuMemcpyDtoD": (there, at, size),
            "cuPointerGetAttribute": (ctypes.byref(c_int()), MEMORY_TYPE, at),
            "cuMemsetD32": (at, c_uint(0), c_size_t(GRAIN // 4)),
            "cuMemGetAddressRange": (ctypes.byref(c_uint64()), ctypes.byref(c_size_t()), at),
        }
        self._answers = {}
        for name, arguments in calls.items():
            threading.Thread(target=self._call, args=(name, arguments), daemon=True).start()
        return "called"

    def _call(self, name: str, arguments: tuple[object, ...]) -> None:
        self._answers[name] = self._driver.code(name, *arguments)

    def answers(self) -> str:
        return ", ".join(f"{name}={code}" for name, code in sorted(self._answers.items()))


def main() -> None:
    aliases = Aliases()
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        print(getattr(aliases, verb)(*arguments), flush=True)


if __name__ == "__main__":
    main()
