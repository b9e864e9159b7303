"""Stories of a container's life, by a runtime that follows them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from kybernate_shim.oci.runtime import RuntimeFailed
from tests.unit.task.runtime import Life

Story = Callable[[Life], Coroutine[Any, Any, None]]
Tell = Callable[[Story], Life]


def failing(verb: str) -> Callable[[], None]:
    def fail() -> None:
        raise RuntimeFailed(verb, "no luck", 1)

    return fail


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
