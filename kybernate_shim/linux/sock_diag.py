"""pyroute2's socket to the kernel's sock_diag, without the rest of pyroute2.

The package's own `__init__` imports all of it: a quarter of a second and 14 MiB, which a daemon keeps. The part that is
needed costs a third of that, and can be imported while an empty package takes its place.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyroute2 import DiagSocket

PACKAGE = "pyroute2"
MODULE = "pyroute2.netlink.diag"


def diag_socket() -> DiagSocket:
    """Return a new socket of the calling thread's network namespace; the first call imports it."""
    if MODULE not in sys.modules:
        _import_alone()
    return sys.modules[MODULE].DiagSocket()


def _import_alone() -> None:
    """Import the module; where it cannot do without the rest, in another release, import the rest, too."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or PACKAGE in sys.modules:
        importlib.import_module(MODULE)
        return
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    try:
        importlib.import_module(MODULE)
    except ImportError:
        del sys.modules[PACKAGE]
        importlib.import_module(MODULE)
    else:
        del sys.modules[PACKAGE]  # a later import of the whole package works
