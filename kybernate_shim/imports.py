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
from pathlib import Path
from types import ModuleType
from typing import Any

from kybernate_shim import tuning

ON_USE = (
    "blake3", "google.protobuf.empty_pb2", "hashlib", "hmac", "kybernate_shim.checkpoint.cleanup",
    "kybernate_shim.checkpoint.image.arriving_plaintext", "kybernate_shim.checkpoint.image.counter",
    "kybernate_shim.checkpoint.image.encrypted",
    "kybernate_shim.checkpoint.image.encrypted_digests", "kybernate_shim.checkpoint.image.genuine",
    "kybernate_shim.checkpoint.image.locate", "kybernate_shim.checkpoint.image.plaintext_memory",
    "kybernate_shim.checkpoint.loopback", "kybernate_shim.info", "kybernate_shim.linux.cgroup.v1",
    "kybernate_shim.linux.cgroup.v2", "kybernate_shim.linux.file_pages", "kybernate_shim.task.fetch",
    "kybernate_shim.task.chosen_image", "kybernate_shim.task.gpu_report",
    "kybernate_shim.task.operation_messages", "kybernate_shim.task.operations", "tomllib", "xxhash",
)  # fmt: skip
ON_USE_OF_GPUS = (
    "kybernate_shim.checkpoint.gpu.accelerator",
    "kybernate_shim.checkpoint.gpu.errors",
    "kybernate_shim.gpu.mover_client",
    "kybernate_shim.vram_io.thread_pool",
)
DRIVER = Path("/proc/driver/nvidia")  # without it, no container that is there has a GPU
OPENSSL = ("ssl", "_hashlib")  # megabytes, of which we would use one hash function; hmac has its own
COMPRESSIONS = ("bz2", "compression.zstd", "lzma")  # of archives, which shutil could read; we have plain ones


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Import as if these modules were not installed, for modules that import them eagerly but can do without them."""
    hidden = [name for name in names if name not in sys.modules and tuning.is_on()]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # what import takes for "not installed"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def postpone(name: str) -> None:
    """Import a module when it is first used, which may be never, although other modules import it eagerly.

    Importlib's own LazyLoader does not help: a second import statement is use enough for it.
    """
    if name in sys.modules or not tuning.is_on():
        return

    def load(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)  # who goes through all modules asks each of them for such
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    stand_in = sys.modules[name] = ModuleType(name)
    vars(stand_in)["__getattr__"] = load


def is_complete() -> bool:
    """Return whether all of it is there already, as in everything that a prepared fork server has forked."""
    return all(name in sys.modules for name in _on_use())


def import_rest() -> None:
    with without(*OPENSSL, *COMPRESSIONS):
        for name in _on_use():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _on_use() -> tuple[str, ...]:
    return ON_USE + ON_USE_OF_GPUS if DRIVER.exists() else ON_USE
