"""Cases that copy or fill memory."""

from __future__ import annotations

import ctypes
import os
import random
from ctypes import c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any

from tests.fakes.cuda.zoo.structures import ON_GPU, ON_HOST, Copy2D, Copy3D, Order, Side2D, Side3D
from tests.fakes.cuda.zoo.visit import PIECE, PLANES, ROW, ROWS, Prepared, Visit, case

SIZE = c_size_t(PIECE)


@case("cuMemcpyHtoD", "cuMemcpyHtoDAsync")
def copy_in(visit: Visit) -> Prepared:
    piece, content = visit.piece(), os.urandom(PIECE)
    yield piece.at, content, SIZE
    assert piece.read() == content


@case("cuMemcpyHtoDAsync pinned")
def copy_in_pinned(visit: Visit) -> Prepared:
    piece, content = visit.piece(), os.urandom(PIECE)
    host = visit.pinned(content)
    yield piece.at, host, SIZE
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert piece.read() == content
    visit.driver.call("cuMemFreeHost", host)


@case("cuMemcpyDtoH", "cuMemcpyDtoHAsync")
def copy_out(visit: Visit) -> Prepared:
    content, target = os.urandom(PIECE), ctypes.create_string_buffer(PIECE)
    yield target, visit.piece(content).at, SIZE
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert target.raw == content


@case("cuMemcpyDtoHAsync registered")
def copy_out_registered(visit: Visit) -> Prepared:
    content, target, event = os.urandom(PIECE), ctypes.create_string_buffer(PIECE), c_void_p()
    visit.driver.call("cuMemHostRegister", target, SIZE, 0)
    visit.driver.call("cuEventCreate", ctypes.byref(event), 2)
    yield target, visit.piece(content).at, SIZE
    visit.driver.call("cuEventRecord", event, visit.stream)
    visit.driver.call("cuEventSynchronize", event)
    assert target.raw == content
    visit.driver.call("cuEventDestroy", event)
    visit.driver.call("cuMemHostUnregister", target)


@case("cuMemcpyDtoD", "cuMemcpyDtoDAsync", "cuMemcpy", "cuMemcpyAsync")
def copy_across(visit: Visit) -> Prepared:
    content, target = os.urandom(PIECE), visit.piece()
    yield target.at, visit.piece(content).at, SIZE
    assert target.read() == content


@case("cuMemcpy to pinned", "cuMemcpyAsync to pinned")
def copy_unified(visit: Visit) -> Prepared:
    content, address = os.urandom(PIECE), c_uint64()
    host = visit.pinned(bytes(PIECE))
    visit.driver.call("cuMemHostGetDevicePointer", ctypes.byref(address), host, 0)
    yield address, visit.piece(content).at, SIZE
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert ctypes.string_at(host, PIECE) == content
    visit.driver.call("cuMemFreeHost", host)


@case("cuMemcpyPeer", "cuMemcpyPeerAsync")
def copy_to_peer(visit: Visit) -> Prepared:
    content, target, context = os.urandom(PIECE), visit.piece(), visit.driver.context
    yield target.at, context, visit.piece(content).at, context, SIZE
    assert target.read() == content


@case("cuMemcpyBatchAsync")
def copy_batch(visit: Visit) -> Prepared:
    contents = [os.urandom(PIECE) for _ in range(2)]
    targets, sources = [visit.piece() for _ in contents], [visit.piece(content) for content in contents]
    addresses = [(c_uint64 * 2)(*(piece.address for piece in pieces)) for pieces in (targets, sources)]
    yield *addresses, (c_size_t * 2)(PIECE, PIECE), c_size_t(2), Order(1), (c_size_t * 1)(0), c_size_t(1)
    assert [target.read() for target in targets] == contents


@case("cuMemcpy2D", "cuMemcpy2DUnaligned", "cuMemcpy2DAsync")
def copy_rows(visit: Visit) -> Prepared:
    """Of the left half of a device's rows, into the right half of others."""
    half, rows = ROW // 2, ROWS * PLANES
    content, old = os.urandom(PIECE), os.urandom(PIECE)
    source, target = visit.piece(content), visit.piece(old)
    ends = Side2D(0, 0, ON_GPU, None, source.address, None, ROW), Side2D(half, 0, ON_GPU, 0, target.address, 0, ROW)
    yield (ctypes.byref(Copy2D(*ends, half, rows)),)
    assert target.read() == b"".join(old[at : at + half] + content[at : at + half] for at in range(0, PIECE, ROW))


def box(source: Side3D, target: Side3D) -> Copy3D:
    return Copy3D(source, target, ROW, ROWS, PLANES)


@case("cuMemcpy3D", "cuMemcpy3DAsync")
def copy_box(visit: Visit) -> Prepared:
    """From the host."""
    content, target = os.urandom(PIECE), visit.piece()
    host = ctypes.create_string_buffer(content, PIECE)
    source = Side3D(0, 0, 0, 0, ON_HOST, ctypes.addressof(host), 0, None, None, ROW, ROWS)
    yield (ctypes.byref(box(source, Side3D(0, 0, 0, 0, ON_GPU, 0, target.address, 0, 0, ROW, ROWS))),)
    assert target.read() == content


def fill_case(bits: int, kind: Any) -> None:
    value, step = random.getrandbits(bits), bits // 8

    @case(f"cuMemsetD{bits}", f"cuMemsetD{bits}Async")
    def fill(visit: Visit) -> Prepared:
        piece = visit.piece()
        yield piece.at, kind(value), c_size_t(PIECE // step)
        assert piece.read() == value.to_bytes(step, "little") * (PIECE // step)

    @case(f"cuMemsetD2D{bits}", f"cuMemsetD2D{bits}Async")
    def fill_rows(visit: Visit) -> Prepared:
        old, half = os.urandom(PIECE), ROW // 2
        piece = visit.piece(old)
        yield piece.at, c_size_t(ROW), kind(value), c_size_t(half // step), c_size_t(ROWS * PLANES)
        left = value.to_bytes(step, "little") * (half // step)
        assert piece.read() == b"".join(left + old[at + half : at + ROW] for at in range(0, PIECE, ROW))


for bits, kind in ((8, c_ubyte), (16, c_ushort), (32, c_uint)):
    fill_case(bits, kind)
