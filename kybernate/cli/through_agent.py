"""What a command prints of an operation that the agent has begun."""

from __future__ import annotations

from kybernate.cli.output import echo
from kybernate.client import Operation


def begun(operation: Operation) -> None:
    """Print the id of an operation that is not waited for."""
    echo(operation.id)
