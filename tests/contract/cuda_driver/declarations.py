"""Which functions of the driver take device pointers, as NVIDIA's own declarations say.

They come with the Python package of the driver's functions: every function, structure and other name of cuda.h.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

POINTER = "CUdeviceptr"
FUNCTION = re.compile(r"^cdef CUresult (\w+)\((.*?)\) except", re.MULTILINE)
STRUCTURE = re.compile(r"^    (?:ctypedef|cdef) (?:struct|union) (\w+).*:\n((?:        .+\n)+)", re.MULTILINE)
ALIAS = re.compile(r"^    ctypedef (\w+) (\w+)", re.MULTILINE)
NAME = re.compile(r"\w+")


def device_pointer_functions() -> set[str]:
    """Return the names of all functions with a device pointer among their parameters, or in a structure of one.

    They are without the suffix of a version, as cuGetProcAddress takes them.
    """
    text = _declarations()
    types = _with_pointers(text)
    return {name for name, parameters in FUNCTION.findall(text) if types.intersection(NAME.findall(parameters))}


def _declarations() -> str:
    spec = find_spec("cuda.bindings")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "cydriver.pxd").read_text()


def _with_pointers(text: str) -> set[str]:
    """Return the names of all types that are, point to or hold a device pointer."""
    holds: dict[str, set[str]] = {new: {old} for old, new in ALIAS.findall(text) if old not in ("struct", "union")}
    for name, members in STRUCTURE.findall(text):
        holds.setdefault(name, set()).update(line.split()[0].rstrip("*") for line in members.splitlines())
    found, before = {POINTER}, 0
    while len(found) > before:
        before = len(found)
        found |= {name for name, parts in holds.items() if parts & found}
    return found
