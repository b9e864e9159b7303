"""The driver's structures, as its header has them, that cases hand to its functions."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p

ON_HOST, ON_GPU = 1, 2  # of a side of a copy, CUmemorytype
MEMORY_TYPE, DEVICE_POINTER, SYNC_MEMOPS, IS_MANAGED, DEVICE_ORDINAL = 2, 3, 6, 8, 9  # of a pointer's attributes


class Location(ctypes.Structure):
    """CUmemLocation: a device."""

    _fields_ = (("type", c_int), ("id", c_int))


class Wanted(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_uint64),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class Side2D(ctypes.Structure):
    """One end of CUDA_MEMCPY2D."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("type", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("pitch", c_size_t),
    )


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", Side2D), ("target", Side2D), ("width", c_size_t), ("height", c_size_t))


class Side3D(ctypes.Structure):
    """One end of CUDA_MEMCPY3D."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("level", c_size_t),
        ("type", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class Copy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("source", Side3D),
        ("target", Side3D),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


class Fill(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("to", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, of a wait or a write."""

    _fields_ = (
        ("kind", c_int),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
        ("rest", c_uint64),
    )


class Order(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", c_int), ("source", Location), ("target", Location), ("flags", c_uint))
