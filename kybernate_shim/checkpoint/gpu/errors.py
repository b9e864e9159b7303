"""Why a step on a container's GPUs was not done."""

from __future__ import annotations

from kybernate_shim.errors import Refused


class NothingToResume(Refused):
    """No process of the container waits for its GPU."""
