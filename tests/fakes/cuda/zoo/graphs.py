"""Cases that have the GPU work: graphs, and a kernel."""

from __future__ import annotations

import ctypes
import os
import random
from ctypes import c_char_p, c_size_t, c_uint64, c_void_p
from typing import Any

from tests.fakes.cuda.zoo.copies import box
from tests.fakes.cuda.zoo.structures import ON_GPU, Copy3D, Fill, Side3D
from tests.fakes.cuda.zoo.visit import NONE, PIECE, ROW, ROWS, Driver, Piece, Prepared, Visit, case


class Graph:
    """A graph, which is run once, and its end."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.handle, self.node, self.executable = driver, c_void_p(), c_void_p(), c_void_p()
        driver.call("cuGraphCreate", ctypes.byref(self.handle), 0)

    def add(self, kind: str, parameters: ctypes.Structure) -> None:
        self._driver.call(f"cuGraphAdd{kind}Node", *self.arguments(parameters))

    def arguments(self, parameters: ctypes.Structure) -> tuple[Any, ...]:
        return (ctypes.byref(self.node), self.handle, None, c_size_t(), ctypes.byref(parameters), self._driver.context)

    def instantiate(self) -> None:
        self._driver.call("cuGraphInstantiate", ctypes.byref(self.executable), self.handle, NONE)

    def run(self, stream: c_void_p) -> None:
        self.instantiate()
        self._driver.call("cuGraphLaunch", self.executable, stream)
        self._driver.call("cuStreamSynchronize", stream)

    def destroy(self) -> None:
        self._driver.call("cuGraphExecDestroy", self.executable)
        self._driver.call("cuGraphDestroy", self.handle)


def device_copy(source: Piece, target: Piece) -> Copy3D:
    return box(*(Side3D(0, 0, 0, 0, ON_GPU, None, piece.address, None, None, ROW, ROWS) for piece in (source, target)))


@case("cuGraphAddMemcpyNode")
def copy_in_graph(visit: Visit) -> Prepared:
    content, target, graph = os.urandom(PIECE), visit.piece(), Graph(visit.driver)
    yield graph.arguments(device_copy(visit.piece(content), target))
    graph.run(visit.stream)
    assert target.read() == content
    graph.destroy()


@case("cuGraphAddMemsetNode")
def fill_in_graph(visit: Visit) -> Prepared:
    piece, graph = visit.piece(), Graph(visit.driver)
    yield graph.arguments(Fill(piece.address, 0, 0x55, 1, PIECE, 1))
    graph.run(visit.stream)
    assert piece.read() == b"\x55" * PIECE
    graph.destroy()


@case("cuGraphLaunch")
def launch_graph(visit: Visit) -> Prepared:
    content, target, graph = os.urandom(PIECE), visit.piece(), Graph(visit.driver)
    graph.add("Memcpy", device_copy(visit.piece(content), target))
    graph.instantiate()
    yield graph.executable, visit.stream
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert target.read() == content
    graph.destroy()


@case("cuLaunchKernel")
def launch_kernel(visit: Visit) -> Prepared:
    """Of a pretended GPU's own kernel: it needs no module that a compiler has made."""
    words, module, kernel = random.getrandbits(32), c_void_p(), c_void_p()
    piece, count = visit.piece(words.to_bytes(4, "little") * (PIECE // 4)), c_uint64(PIECE // 4)
    visit.driver.call("cuModuleLoadData", ctypes.byref(module), b"")
    visit.driver.call("cuModuleGetFunction", ctypes.byref(kernel), module, c_char_p(b"advance"))
    address = piece.at
    parameters = (c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(count))
    yield kernel, 1, 1, 1, 1, 1, 1, 0, visit.stream, parameters, None
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert piece.read()[:4] == ((words * 1664525 + 1013904223) % 2**32).to_bytes(4, "little")
