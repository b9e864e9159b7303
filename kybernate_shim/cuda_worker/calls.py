"""The answers of calls of `cuda.bindings.driver`, as values and exceptions. For the arena's worker alone."""

from __future__ import annotations

from typing import Any


class DriverRefused(Exception):
    """The driver has refused a call."""


def checked(answer: Any) -> Any:
    """Return the values of a driver call without its result code, several in a list. Raises DriverRefused."""
    result, *values = answer
    if result:
        raise DriverRefused(f"the driver refuses a step of the arena: {result.name}")
    if len(values) > 1:
        return values
    return values[0] if values else None
