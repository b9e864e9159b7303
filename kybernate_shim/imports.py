"""What is imported on use, and in advance where there is time.

The first container of a node waits for every import, so it waits for none that it does not need. But a daemon outlives
the upgrade of its files, after which it would get the new version's module: so nothing is left to be imported late.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ON_USE = (
    "difflib", "google.protobuf.empty_pb2", "hashlib", "kybernate_shim.checkpoint.loopback",
    "kybernate_shim.checkpoint.remains", "kybernate_shim.cuda.vram.client", "kybernate_shim.cuda.vram.crew",
    "kybernate_shim.info", "kybernate_shim.linux.cgroup1", "kybernate_shim.linux.cgroup2",
    "kybernate_shim.task.operations", "tempfile", "tomllib", "urllib.parse", "xxhash",
)  # fmt: skip


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Import as if these modules were not installed: what can do without them, and takes them at once, then does."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # what import takes for "not installed"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def is_complete() -> bool:
    """Tell whether all of it is there already, as in everything that a prepared fork server has forked."""
    return all(name in sys.modules for name in ON_USE)


def import_rest() -> None:
    for name in ON_USE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
